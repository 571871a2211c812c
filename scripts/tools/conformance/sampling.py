"""Cases 53-65: each prompt ends in a token whose logits are known exactly (scripted_model.py)."""

from scripts.tools.conformance.assertions import expect
from scripts.tools.conformance.cases import Need, Section, sends, wire
from scripts.tools.conformance.runners import Target

SAMPLING = Section("Sampling")
SEED = sends("seed")
NO_SEED = Need(lambda generation: "seed" not in generation.option_keys, "the host sends seeds")
REPEAT = sends("repeat_last_n", "repeat_penalty")
PRESENCE = sends("repeat_last_n", "presence_penalty")


async def drawn(target: Target, prompt: str, **options: object) -> str:
    """The text of one completion, one token long unless told otherwise."""
    return await target.text(prompt, **({"num_predict": 1} | options))


async def draws(target: Target, times: int, prompt: str, **options: object) -> set[str]:
    """Returns `count` draws at temperature 1, with a different seed each where seeds are sent."""
    return {await drawn(target, prompt, temperature=1.0, seed=seed, **options) for seed in range(1, times + 1)}


@SAMPLING.case(53, "seed", wire, SEED)
async def a_seed_fixes_the_draws(target: Target) -> None:
    """The same seed draws the same, another one something else, -1 something new each time."""

    async def text(seed: int) -> str:
        return await drawn(target, "W", temperature=1.0, seed=seed, num_predict=40)

    seven = await text(7)
    expect("seed 7 again", await text(7), seven)
    expect("tokens drawn", set(seven), set("WXYZ"))
    assert await text(8) != seven, "seeds 7 and 8 draw the same"
    assert await text(-1) != await text(-1), "seed -1 draws the same twice"


@SAMPLING.case(54, "absent-seed-is-zero", wire, SEED)
async def an_absent_seed_is_seed_zero(target: Target) -> None:
    """With hosts that send seeds, an absent seed means seed 0, so answers repeat."""
    texts = {await drawn(target, "W", temperature=1.0, num_predict=40) for _ in range(3)}
    expect("different texts", len(texts), 1)


@SAMPLING.case(55, "absent-seed-is-random", wire, NO_SEED)
async def an_absent_seed_is_random(target: Target) -> None:
    """With hosts that send no seeds, every answer is sampled anew."""
    texts = {await drawn(target, "W", temperature=1.0, num_predict=40) for _ in range(3)}
    expect("different texts", len(texts), 3)


@SAMPLING.case(56, "presence-penalty", wire, PRESENCE)
async def presence_penalty(target: Target) -> None:
    """The presence penalty is subtracted: 5 - 6 loses to 4, 5 - 0.5 does not."""
    expect("with 6", await drawn(target, "Q", presence_penalty=6.0, repeat_last_n=1), "S")
    expect("with 0.5", await drawn(target, "Q", presence_penalty=0.5, repeat_last_n=1), "Q")


@SAMPLING.case(57, "repeat-penalty", wire, REPEAT)
async def repeat_penalty_divides_or_multiplies_by_the_sign(target: Target) -> None:
    """The repeat penalty divides what is positive and multiplies what is negative."""
    expect("5 / 2 against 4", await drawn(target, "Q", repeat_penalty=2.0, repeat_last_n=1), "S")
    expect("-1 * 4 against -3", await drawn(target, "U", repeat_penalty=4.0, repeat_last_n=1), "V")
    expect("-1 * 2 against -3", await drawn(target, "U", repeat_penalty=2.0, repeat_last_n=1), "U")


@SAMPLING.case(58, "frequency-penalty", wire, sends("repeat_last_n", "frequency_penalty"))
async def frequency_penalty_counts_occurrences(target: Target) -> None:
    """The frequency penalty is subtracted once for each occurrence: 5 - 2 * 0.75 loses to 4, 5 - 0.75 does not."""
    expect("twice", await drawn(target, "QQ", frequency_penalty=0.75, repeat_last_n=4), "S")
    expect("once", await drawn(target, "Q", frequency_penalty=0.75, repeat_last_n=4), "Q")


@SAMPLING.case(59, "no-window-no-penalty", wire, REPEAT)
async def without_a_window_penalties_are_off(target: Target) -> None:
    """Without repeat_last_n penalties are off."""
    expect("text", await drawn(target, "Q", repeat_penalty=2.0, presence_penalty=10.0), "Q")


@SAMPLING.case(60, "whole-context-window", wire, PRESENCE)
async def a_negative_window_is_the_whole_context(target: Target) -> None:
    """A negative repeat_last_n is the whole context."""
    far = "Q" + "x" * 200 + "<pqs>"
    expect("-1", await drawn(target, far, presence_penalty=6.0, repeat_last_n=-1), "S")
    expect("64", await drawn(target, far, presence_penalty=6.0, repeat_last_n=64), "Q")


@SAMPLING.case(61, "top-k", wire)
async def top_k_1_is_the_best(target: Target) -> None:
    """top_k 1 leaves the likeliest token."""
    expect("tokens drawn", await draws(target, 8, "<532>", top_k=1), {"P"})


@SAMPLING.case(62, "top-p-and-min-p", wire)
async def top_p_and_min_p_cut_the_rest_off(target: Target) -> None:
    """top_p 0.4, or min_p 0.7, leaves only the first of 0.5, 0.3, 0.2."""
    expect("tokens drawn with top_p", await draws(target, 8, "<532>", top_p=0.4), {"P"})
    expect("tokens drawn with min_p", await draws(target, 8, "<532>", min_p=0.7), {"P"})


@SAMPLING.case(63, "top-k-before-top-p", wire)
async def top_k_renormalises_before_top_p(target: Target) -> None:
    """top_k is taken first and its rest sums to 1: of 0.6, 0.2, 0.2 top_k 2 and top_p 0.7 leave the first."""
    expect("tokens drawn", await draws(target, 12, "<622>", top_k=2, top_p=0.7), {"P"})


@SAMPLING.case(64, "sliding-window", wire, PRESENCE)
async def the_window_slides_over_prompt_and_answer(target: Target) -> None:
    """The window covers the end of the prompt, then slides over the answer."""
    options = {"presence_penalty": 10.0, "repeat_last_n": 2}
    expect("two tokens", await drawn(target, "KLM", num_predict=2, **options), "KL")
    expect("a window of three", await drawn(target, "KLM", **{**options, "repeat_last_n": 3}), "N")


@SAMPLING.case(65, "ties", wire)
async def of_equal_maxima_the_lowest_id_wins(target: Target) -> None:
    """Of equal maxima the lowest id is taken."""
    expect("tokens drawn", {await drawn(target, "<equal>") for _ in range(6)}, {"B"})
