"""`--ranks N`: several processes answer as one does, and each of them does the same."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.tools.host.lib import Client, Completion, Process, Request
from scripts.tools.host.lib.generations import G
from tests.lib.patience import stretched
from tests.process.conftest import RANDOM, SpawnModel
from tests.process.ranks.conftest import ODD, check_logs, followers, ticks

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ZEBRAS, ONCE = "so many words about zebras " * 9, "once upon a time " * 12
REQUESTS = (
    Request(ZEBRAS, {"num_predict": 40}),
    Request(ONCE, {"num_predict": 20, "temperature": 0.9, "seed": 7}),
    Request(ONCE, {"num_predict": 20, "temperature": 0.8, "seed": 8, "top_k": 20, "top_p": 0.8, "min_p": 0.02}),
    Request(ZEBRAS, {"num_predict": 20, "repeat_penalty": 1.4, "repeat_last_n": 64, "presence_penalty": 0.4}),
    Request(ONCE, {"num_predict": 20, "temperature": 1.0, "seed": 3}, logprobs=True, top_logprobs=3),
    Request(ONCE, {"num_predict": 80, "stop": ["e", "qu"]}),
    Request(
        ONCE, {"num_predict": 60, "temperature": 0.5, "seed": 1}, format={"type": "json_schema", "json_schema": PERSON}
    ),
    Request(ONCE, {"num_predict": 20}, format={"enum": ["abc", "abd", 7]}, logprobs=True, top_logprobs=3),
)


async def ask_all(process: Process) -> list[Completion]:
    """Asks one after the other, then all at once, then for turns of a conversation; some clients leave meanwhile."""
    async with Client.of(process) as client:
        answers = [await client.complete(request) for request in REQUESTS]
        leaving = [client.complete(Request(ONCE + mark, {"num_predict": 3000}), cancel_after=5) for mark in "ab"]
        together = await asyncio.gather(*map(client.complete, REQUESTS[:5]), *leaving)
        answers += together[:5]
        talk = ZEBRAS
        for turn in range(3):
            answers.append(await client.complete(Request(talk, {"num_predict": 30})))
            talk += answers[-1].text + f" and then {turn} "
        return answers


def check_equal(ours: list[Completion], theirs: list[Completion]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.text == other.text
        assert one.final.eval_count == other.final.eval_count
        mine, wanted = ([entry for each in answer.answers for entry in each.logprobs or ()] for answer in (one, other))
        assert [each.token for each in mine] == [each.token for each in wanted]
        assert [each.logprob for each in mine] == pytest.approx([each.logprob for each in wanted], abs=1e-3)
        assert [len(each.top) for each in mine] == [len(each.top) for each in wanted]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--parallel", "4"],
        ["--parallel", "4", "--cache-memory", "300K"],
        ["--cache", "single", "--kv-bits", "8", "--draft-tokens", "3"],
    ],
    ids=" ".join,
)
async def test_two_ranks_answer_as_one(arguments: list[str], start: SpawnModel) -> None:
    alone = start(RANDOM, arguments, generation=G)
    wanted = await ask_all(alone)
    alone.kill()
    process = start(RANDOM, ["--ranks", "2", *arguments], generation=G)
    check_equal(await ask_all(process), wanted)
    told = check_logs(process, len(wanted) + 2)
    outcomes = [each["outcome"] for each in told.values()]
    assert outcomes.count("cancelled") == 2
    if arguments == ["--parallel", "4"]:
        assert sum(int(each.get("drafted", 0)) for each in told.values()) > 0
        assert sum(int(each["matched"]) for each in told.values()) > 0
        assert sum(int(each.get("forced", 0)) for each in told.values()) > 0
        assert await idle_ticks(process) <= 2, "hundredths of a second in 3 s"
    if "300K" in arguments:
        assert any(int(each.get("evicted_bytes", 0)) for each in told.values())


async def test_four_ranks_answer_as_one(start: SpawnModel, wide: Path) -> None:
    alone = start(RANDOM, models_dir=wide, generation=G)
    wanted = await ask_some(alone)
    alone.kill()
    process = start(RANDOM, ["--ranks", "4"], models_dir=wide, generation=G)
    check_equal(await ask_some(process), wanted)
    assert len(followers(process)) == 3
    check_logs(process, 3, ranks=4)


async def test_the_leaders_token_counts(start: SpawnModel) -> None:
    """Machines may round differently."""
    alone = start(RANDOM, generation=G)
    wanted = await ask_some(alone)
    alone.kill()
    odd = {"ODD": "draws"}
    process = start(RANDOM, ["--ranks", "2"], executable=ODD, environment=odd, generation=G)
    check_equal(await ask_some(process), wanted)
    check_logs(process, 3)


async def test_two_ranks_score_as_one(start: SpawnModel) -> None:
    rows = [{"prompt": ZEBRAS + end, "candidates": ["A", "B", "C"]} for end in ("one", "two", "", "two")]

    async def scores(process: Process) -> dict[str, Any]:
        async with Client.of(process) as client:
            sent = client.send("POST", "/v1/score", json.dumps({"max_tokens": 900, "rows": rows}).encode())
            reply, _ = await asyncio.gather(sent, client.complete(REQUESTS[1]))
            return dict(json.loads(reply.body))

    alone = start(RANDOM, generation=G)
    wanted = await scores(alone)
    alone.kill()
    process = start(RANDOM, ["--ranks", "2"], generation=G)
    found = await scores(process)
    assert found["logits"] == [pytest.approx(row, abs=1e-3) for row in wanted["logits"]]
    assert (found["input_tokens"], found["cached_tokens"]) == (wanted["input_tokens"], wanted["cached_tokens"])
    told = check_logs(process, 5)
    assert sorted(int(each["scored"]) for each in told.values()) == [0, 3, 3, 3, 3]


async def ask_some(process: Process) -> list[Completion]:
    """Asks two requests at once, then one of them again."""
    async with Client.of(process) as client:
        return [*await asyncio.gather(*map(client.complete, REQUESTS[:2])), await client.complete(REQUESTS[0])]


async def idle_ticks(process: Process) -> int:
    """Returns the processor time of 3 s in which the follower only waits."""
    (follower,) = followers(process)
    until_s = time.monotonic() + stretched(30)
    used = 99
    while used > 2 and time.monotonic() < until_s:
        before = ticks(follower)
        await asyncio.sleep(3)
        used = ticks(follower) - before
    return used
