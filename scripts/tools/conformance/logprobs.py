"""Cases 66-70: logprobs."""

import math

from scripts.tools.conformance.assertions import ALPHABET, expect
from scripts.tools.conformance.cases import Section, reads, wire
from scripts.tools.conformance.runners import Target
from scripts.tools.host.lib import Completion, Logprob, Request

LOGPROBS = Section("Logprobs")
READS = reads("Logprobs")


def entries(completion: Completion) -> list[Logprob]:
    """The entries of all lines."""
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
    """TopLogprobs without Logprobs asks for nothing."""
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
    """Bytes of an incomplete character at the end have an entry, as all that is counted."""
    completion = await target.complete(Request("<tail>", logprobs=True))
    expect("text", completion.text, "")
    expect("tokens", [entry.token for entry in entries(completion)], ["\ufffd\ufffd"])
    expect("count", completion.final.eval_count, 1)


@LOGPROBS.case(68, "likeliest-first", wire, READS)
async def the_likeliest_come_first(target: Target) -> None:
    """TopLogprobs gives that many, the likeliest first; greedy, the first is the token itself."""
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
        for token, logprob in ((entry.token, entry.logprob), *entry.top):
            close(f"logprob of {token} with {options}", logprob, math.log(raw.get(token, 1e-9)), 1e-5)


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
