"""Conformance cases 66-70 and the floor of section 11."""

import json
import math

import pytest

from tests.host import Client, Completion, G, Logprob, Process, Request


def entries(completion: Completion) -> list[Logprob]:
    return [entry for answer in completion.answers for entry in answer.logprobs or ()]


async def test_case_66_top_logprobs_alone_ask_for_nothing(client: Client) -> None:
    assert entries(await client.complete(Request("Hi", top_logprobs=5))) == []


async def test_case_67_one_entry_per_token_without_the_end(client: Client) -> None:
    completion = await client.complete(Request("Hi", logprobs=True))
    assert [entry.token for entry in entries(completion)] == list("jklmnopqrstuvwxyz")
    assert b"top_logprobs" not in b"".join(completion.lines)
    assert all(entry.logprob == pytest.approx(0.0, abs=1e-6) for entry in entries(completion))


async def test_case_68_the_likeliest_come_first(client: Client) -> None:
    completion = await client.complete(Request("<532>", {"num_predict": 1}, logprobs=True, top_logprobs=3))
    (entry,) = entries(completion)
    assert [top.token for top in entry.top] == ["P", "Q", "S"]
    assert [top.logprob for top in entry.top] == pytest.approx([math.log(p) for p in (0.5, 0.3, 0.2)], abs=1e-5)
    assert (entry.token, entry.logprob) == entry.top[0]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 3.0, "seed": 3},
        {"temperature": 1.0, "top_k": 1, "seed": 3},
        {"presence_penalty": 50.0, "repeat_last_n": 5},
    ],
)
async def test_case_69_values_are_those_of_the_raw_logits(options: dict[str, object], client: Client) -> None:
    request = Request("P Q S <532>", {"num_predict": 1, **options}, logprobs=True, top_logprobs=3)
    (entry,) = entries(await client.complete(request))
    raw = {"P": 0.5, "Q": 0.3, "S": 0.2}
    assert {top.token: math.exp(top.logprob) for top in entry.top} == pytest.approx(raw, abs=1e-5)
    assert math.exp(entry.logprob) == pytest.approx(raw.get(entry.token, 0.0), abs=1e-5)


async def test_case_69_large_logits_stay_finite(client: Client) -> None:
    request = Request("<big>", {"num_predict": 1}, logprobs=True, top_logprobs=20)
    (entry,) = entries(await client.complete(request))
    assert len(entry.top) == 20
    assert [top.token for top in entry.top[:3]] == ["P", "Q", "S"]
    step = 2.0**-14  # between two neighbouring float32 numbers at 1000
    assert sum(math.exp(top.logprob) for top in entry.top) == pytest.approx(1.0, abs=step)


async def test_case_70_a_character_of_several_tokens_is_one_line_with_all_entries(client: Client) -> None:
    completion = await client.complete(Request("<utf8-0>", logprobs=True))
    assert [len(answer.logprobs or ()) for answer in completion.answers if answer.content] == [2, 1]
    assert [entry.token for entry in entries(completion)] == ["\ufffd\ufffd", "\ufffd\ufffd", "\ufffd\ufffd"]


async def test_values_below_minus_9999_are_floored(shared: Process) -> None:
    async with Client(shared.port, G) as client:
        completion = await client.complete(Request("<deep>", {"num_predict": 1}, logprobs=True, top_logprobs=3))
    (entry,) = entries(completion)
    assert entry.logprob == 0.0
    assert [top.logprob for top in entry.top] == [0.0, -9999.0, -9999.0]


async def test_logprobs_are_absent_from_lines_that_were_not_asked_for_them(client: Client) -> None:
    for line in (await client.complete(Request("Hi"))).lines[:-1]:
        assert not json.loads(line).get("Logprobs")
