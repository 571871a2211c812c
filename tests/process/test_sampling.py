"""Conformance cases 53-65 over the wire: each prompt ends in a token whose logits are known to the last bit."""

import pytest

from tests.host import GENERATIONS, Client, E, F, Generation, Process, Request


async def drawn(client: Client, prompt: str, **options: object) -> str:
    """The text of one completion, one token long unless told otherwise."""
    return (await client.complete(Request(prompt, {"num_predict": 1, **options}))).text


async def test_case_53_a_seed_fixes_the_draws(client: Client) -> None:
    async def text(seed: int) -> str:
        return await drawn(client, "W", temperature=1.0, seed=seed, num_predict=40)

    assert await text(7) == await text(7)
    assert await text(8) != await text(7)
    assert set(await text(7)) == set("WXYZ")
    assert await text(-1) != await text(-1)


@pytest.mark.parametrize("generation", [E, F], ids=lambda generation: generation.letter)
async def test_case_54_from_e_on_an_absent_seed_is_seed_zero(generation: Generation, shared: Process) -> None:
    async with Client(shared.port, generation) as client:
        texts = {await drawn(client, "W", temperature=1.0, num_predict=40) for _ in range(3)}
    assert len(texts) == 1


@pytest.mark.parametrize("generation", GENERATIONS[:5], ids=lambda generation: generation.letter)
async def test_case_55_before_e_an_absent_seed_is_random(generation: Generation, shared: Process) -> None:
    async with Client(shared.port, generation) as client:
        texts = {await drawn(client, "W", temperature=1.0, num_predict=40) for _ in range(3)}
    assert len(texts) == 3


async def test_draws_follow_the_temperature(client: Client) -> None:
    """At temperature 0.1 the 0.5 of P against 0.3 of Q is 165 to 1."""
    cold = [await drawn(client, "<532>", temperature=0.1, seed=seed) for seed in range(40)]
    warm = [await drawn(client, "<532>", temperature=1.0, seed=seed) for seed in range(40)]
    assert cold.count("P") >= 38
    assert set(warm) == set("PQS")


async def test_case_56_presence_penalty(client: Client) -> None:
    assert await drawn(client, "Q", presence_penalty=6.0, repeat_last_n=1) == "S"
    assert await drawn(client, "Q", presence_penalty=0.5, repeat_last_n=1) == "Q"


async def test_case_57_repeat_penalty_divides_or_multiplies_by_the_sign(client: Client) -> None:
    assert await drawn(client, "Q", repeat_penalty=2.0, repeat_last_n=1) == "S"
    assert await drawn(client, "U", repeat_penalty=4.0, repeat_last_n=1) == "V"
    assert await drawn(client, "U", repeat_penalty=2.0, repeat_last_n=1) == "U", "-2 still beats -3"


async def test_case_58_frequency_penalty_counts_occurrences(client: Client) -> None:
    """5 - 2 * 0.75 = 3.5 loses to 4, 5 - 0.75 does not."""
    assert await drawn(client, "QQ", frequency_penalty=0.75, repeat_last_n=4) == "S"
    assert await drawn(client, "Q", frequency_penalty=0.75, repeat_last_n=4) == "Q"


async def test_case_59_without_a_window_penalties_are_off(client: Client) -> None:
    assert await drawn(client, "Q", repeat_penalty=2.0, presence_penalty=10.0) == "Q"


async def test_case_60_a_negative_window_is_the_whole_context(client: Client) -> None:
    far = "Q" + "x" * 200 + "<pqs>"
    assert await drawn(client, far, presence_penalty=6.0, repeat_last_n=-1) == "S"
    assert await drawn(client, far, presence_penalty=6.0, repeat_last_n=64) == "Q"


async def test_case_61_top_k_1_is_the_best(client: Client) -> None:
    assert {await drawn(client, "<154>", temperature=1.0, top_k=1, seed=seed) for seed in range(12)} == {"Q"}


async def test_case_62_top_p_and_min_p_cut_the_rest_off(client: Client) -> None:
    for options in ({"top_p": 0.4}, {"min_p": 0.7}):
        assert {await drawn(client, "<532>", temperature=1.0, seed=seed, **options) for seed in range(12)} == {"P"}


async def test_top_p_keeps_the_token_that_crosses_it(client: Client) -> None:
    texts = {await drawn(client, "<532>", temperature=1.0, top_p=0.6, seed=seed) for seed in range(40)}
    assert texts == {"P", "Q"}


async def test_case_63_top_k_renormalises_before_top_p(client: Client) -> None:
    texts = {await drawn(client, "<622>", temperature=1.0, top_k=2, top_p=0.7, seed=seed) for seed in range(24)}
    assert texts == {"P"}


async def test_case_64_the_window_slides_over_prompt_and_answer(client: Client) -> None:
    options = {"presence_penalty": 10.0, "repeat_last_n": 2, "num_predict": 2}
    assert await drawn(client, "KLM", **options) == "KL"
    assert await drawn(client, "KLM", **{**options, "repeat_last_n": 3, "num_predict": 1}) == "N"


async def test_case_65_of_equal_maxima_the_lowest_id_wins(client: Client) -> None:
    assert await drawn(client, "<equal>") == "B"


async def test_seeded_draws_do_not_depend_on_the_cache_or_on_others(client: Client) -> None:
    """The same request right after itself (cached) and after another one (not cached) draws the same."""
    options = {"temperature": 1.0, "seed": 5, "num_predict": 30}
    first = await drawn(client, "drawing W", **options)
    assert await drawn(client, "drawing W", **options) == first
    await drawn(client, "something else altogether", temperature=1.0, seed=-1)
    assert await drawn(client, "drawing W", **options) == first
