"""Sampling (docs/internals/wire.md, 9), log-probabilities and /v1/tokenize."""

import json
import math
import time

from scripts.tools.conformance.assertions import ALPHABET, expect, generating
from scripts.tools.conformance.cases import Need, Section, once, reads, sends, wire
from scripts.tools.conformance.models import SENTENCEPIECE, SMALL
from scripts.tools.conformance.runners import Target
from scripts.tools.conformance.scripted_model import BEGIN, END, token
from scripts.tools.host.lib import Completion, Logprob, Request

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
    """The same seed draws the same tokens, another seed others, and -1 new ones each time."""

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


LOGPROBS = Section("Logprobs")
READS = reads("Logprobs")


def entries(completion: Completion) -> list[Logprob]:
    return [entry for answer in completion.answers for entry in answer.logprobs or ()]


def close(what: str, got: float, wanted: float, within: float) -> None:
    """Fails unless the two are that near to each other."""
    assert abs(got - wanted) <= within, f"{what}: {got}, wanted {wanted}"


async def first_entry(target: Target, prompt: str, top: int, **options: object) -> Logprob:
    """The entry of a completion that is one token long."""
    request = Request(prompt, {"num_predict": 1, **options}, logprobs=True, top_logprobs=top)
    found = entries(await target.complete(request))
    expect("entries for one token", len(found), 1)
    expect("likeliest tokens", len(found[0].top), top)
    return found[0]


@LOGPROBS.case(66, "not-asked-for", wire, READS)
async def top_logprobs_alone_ask_for_nothing(target: Target) -> None:
    """TopLogprobs without Logprobs has no effect."""
    for top in (0, 5):
        expect(f"entries for TopLogprobs {top}", entries(await target.complete(Request("Hi", top_logprobs=top))), [])


@LOGPROBS.case(67, "one-per-token", wire, READS)
async def one_entry_per_token_without_the_end(target: Target) -> None:
    """Logprobs alone gives one entry per token, none for the EOS, and no top_logprobs."""
    completion = await target.complete(Request("Hi", logprobs=True))
    expect("tokens", [entry.token for entry in entries(completion)], list(ALPHABET))
    assert b"top_logprobs" not in b"".join(completion.lines), "there are top_logprobs"
    for entry in entries(completion):
        close(f"logprob of {entry.token}", entry.logprob, 0.0, 1e-6)


@LOGPROBS.case(67, "utf8-tail", wire, READS, beyond=True)
async def bytes_that_are_not_shown_have_an_entry(target: Target) -> None:
    """Bytes of an incomplete character at the end have an entry, like all counted tokens."""
    completion = await target.complete(Request("<tail>", logprobs=True))
    expect("text", completion.text, "")
    expect("tokens", [entry.token for entry in entries(completion)], ["\ufffd\ufffd"])
    expect("count", completion.final.eval_count, 1)


@LOGPROBS.case(68, "likeliest-first", wire, READS)
async def the_likeliest_come_first(target: Target) -> None:
    """TopLogprobs is the number of alternatives, the likeliest first; if greedy, the first is the token itself."""
    entry = await first_entry(target, "<532>", 3)
    expect("tokens", [top.token for top in entry.top], ["P", "Q", "S"])
    for top, probability in zip(entry.top, (0.5, 0.3, 0.2), strict=True):
        close(f"logprob of {top.token}", top.logprob, math.log(probability), 1e-5)
    expect("the token itself", (entry.token, entry.logprob), tuple(entry.top[0]))


@LOGPROBS.case(69, "raw-logits", wire, READS)
async def values_are_those_of_the_raw_logits(target: Target) -> None:
    """Values do not depend on temperature, filters and penalties."""
    raw = {"P": 0.5, "Q": 0.3, "S": 0.2}
    for options in (
        {"temperature": 3.0, "seed": 3},
        {"temperature": 1.0, "top_k": 1, "seed": 3},
        {"presence_penalty": 50.0, "repeat_last_n": 5},
    ):
        entry = await first_entry(target, "P Q S <532>", 3, **options)
        for said, logprob in ((entry.token, entry.logprob), *entry.top):
            close(f"logprob of {said} with {options}", logprob, math.log(raw.get(said, 1e-9)), 1e-5)


@LOGPROBS.case(69, "large-logits", wire, READS)
async def large_logits_stay_finite(target: Target) -> None:
    """Logits of 1000 give finite values, whose probabilities sum to 1."""
    entry = await first_entry(target, "<big>", 20)
    expect("tokens", [top.token for top in entry.top[:3]], ["P", "Q", "S"])
    step = 2.0**-14  # between two neighbouring float32 numbers at 1000
    close("sum of probabilities", sum(math.exp(top.logprob) for top in entry.top), 1.0, step)


@LOGPROBS.case(70, "several-tokens-per-character", wire, READS)
async def a_character_of_several_tokens_is_one_line_with_all_entries(target: Target) -> None:
    """A character of several tokens is one line with an entry for each of them."""
    completion = await target.complete(Request("<utf8-0>", logprobs=True))
    counts = [len(answer.logprobs or ()) for answer in completion.answers if answer.content]
    expect("entries per line", counts, [2, 1])
    expect("their texts", [entry.token for entry in entries(completion)], ["\ufffd\ufffd"] * 3)


TOKENIZE = Section("Tokenize")


async def ids(target: Target, text: str, model: str) -> list[int]:
    return await (await target.client(model)).tokenize(text)


@TOKENIZE.case(71, "text", once)
async def text_becomes_ids(target: Target) -> None:
    """Text becomes an array of ids, with the BOS where the model adds one."""
    reply = await (await target.client()).send("POST", "/v1/tokenize", "é\n".encode(), {"Content-Type": "text/plain"})
    expect("status and ids", (reply.status, json.loads(reply.body)), (200, list("é\n".encode())))
    expect("ids with a BOS", await ids(target, "hello", SMALL), [BEGIN, *b"hello"])
    expect("ids of a SentencePiece model", await ids(target, "a b\té", SENTENCEPIECE), list("a b\té".encode()))


@TOKENIZE.case(72, "special", once)
async def special_texts_become_their_ids(target: Target) -> None:
    """The text of a special token becomes its one id."""
    client = await target.client()
    wanted = [ord("a"), token("<think>"), ord("b"), END]
    expect("ids", await client.tokenize("a<think>b<|end|>"), wanted)
    expect("ids with a BOS", await ids(target, "<|end|>", SMALL), [BEGIN, END])


@TOKENIZE.case(73, "while-generating", once)
async def tokenize_is_answered_while_a_stream_is_open(target: Target) -> None:
    """It is answered promptly while another connection generates."""
    client = await target.client()
    async with generating(client):
        started = time.monotonic()
        expect("ids", await client.tokenize("hello"), list(b"hello"))
        taken = time.monotonic() - started
        assert taken < 1.0, f"it took {taken:.1f} s"


@TOKENIZE.case(73, "inside-the-final-line", wire)
async def tokenize_is_answered_inside_the_final_line(target: Target) -> None:
    """It is answered while the host handles the last line of a stream that is still open."""
    client = await target.client()
    completion = await client.complete(Request("Hi"), tokenize=True)
    expect("context", completion.context, list(f"Hi{ALPHABET}".encode()))


@TOKENIZE.case(74, "empty", once)
async def nothing_is_no_tokens(target: Target) -> None:
    """An empty text has no tokens, or the BOS alone."""
    expect("ids", await (await target.client()).tokenize(""), [])
    expect("ids with a BOS", await ids(target, "", SMALL), [BEGIN])
