"""A fault in one request is told to that one client, and the process goes on (conformance case 51, everywhere)."""

import asyncio
import json

import pytest

from scripts.tools.conformance.fault_points import COMPANY_ONLY, FATAL, NO_MEMORY, POINTS
from scripts.tools.host.lib import OUT_OF_MEMORY, Client, Process, Request, StatusError
from tests.process.conftest import FAULTY, SpawnModel
from tests.process.faults.demand import Demand

ALPHABET = "jklmnopqrstuvwxyz"
IN_DECODE = ("forward", "sample", "start evaluation", "page out layers", "count forward", "record", "decode text")
AFTER_THE_ANSWER = (
    "close generation",
    "close session",
    "end session",
    "keep",
    "rewind layers",
    "evaluate layers",
    "advance",
    "snapshot",
    "merge expired",
)
NOT_ALONE = COMPANY_ONLY | {"drop", "return to prefill", "trim", "truncate"}
"""What one request after the other does not come to with a model of plain keys and values."""

MEETING = (
    *("join", "join rows", "join layers", "join samples", "join samplers", "sample together", "release samplers"),
    *("part", "part rows", "part layers", "part samples"),
)
"""Where answers begin and cease to be computed together."""
WAVE = [(Request("0", {"num_predict": length}), ("1234567890" * 32)[:length]) for length in (320, 240, 160)]
_WAVES = 5

Breakable = tuple[Process, Demand]


async def ask(client: Client, request: Request) -> tuple[str, str | None]:
    """The text that came, and the error that ended it, if one did: in the form that hosts know."""
    text, failure = "", None
    try:
        async with client.stream(request) as stream:
            async for answer in stream:
                text += answer.content
    except StatusError as error:
        failure = str(error)
    *before, last = map(json.loads, stream.lines)
    assert last.get("Error") == (failure and {"StatusCode": 500, "Status": "", "error": failure})
    assert not any(line.get("Error") for line in before)
    return text, failure


async def check_serving(client: Client) -> None:
    """The next ones are right, one of them with a prefix that was used before."""
    assert await ask(client, Request("Hi")) == (ALPHABET, None)
    assert await ask(client, Request("the same beginning, then a", {"num_predict": 5})) == ("bcdef", None)


async def test_a_fault_at_any_point_ends_one_request(breakable: Breakable, client: Client) -> None:
    _, demand = breakable
    long = "a prompt of more bytes than the cache may keep: " + "q" * 1500
    broken = set()
    for number, point in enumerate(point for point in POINTS if point not in NOT_ALONE | set(FATAL)):
        demand.ask(point, "fault")
        for prompt in (
            *("the same beginning, then w", "the same beginning, or another w", "the same beginning, then w, w"),
            *("the same beginning, then w, wxyz and w", f"{number} {long} w", f"{number} {long} and more of it w"),
        ):
            text, error = await ask(client, Request(prompt, {"num_predict": 3}, logprobs=True))
            assert text == "xyz"[: len(text)]
            assert error is not None or text == "xyz"
            if error is not None:
                assert not any(phrase in error.lower() for phrase in OUT_OF_MEMORY)
                assert "Error: mlx: panic: CUDA error, allocation-failed" in error
                broken.add(point)
            if demand.struck(point):
                break
        assert demand.struck(point), f"nothing came to {point!r}"
        await check_serving(client)
    assert broken >= {"forward", "sample", "record", "decode text", "spell token", "count"}


@pytest.mark.parametrize("point", IN_DECODE)
async def test_a_fault_in_the_middle_of_an_answer_ends_it_there(
    point: str, breakable: Breakable, client: Client
) -> None:
    _, demand = breakable
    response = await client.post_completion(Request("0"))
    lines = []
    async for line in response.content:  # to its end: one that is broken off raises
        lines.append(json.loads(line))
        if len(lines) == 3:
            demand.ask(point, "fault")
    *before, last = lines
    assert last["Error"]["StatusCode"] == 500
    assert "a place that has no memory" in last["Error"]["error"]
    assert len(before) >= 3
    assert not any(line.get("Error") or line["Done"] for line in before)
    assert "".join(line["Content"] for line in before) == ("1234567890" * len(before))[: len(before)]
    await check_serving(client)


@pytest.mark.parametrize("point", AFTER_THE_ANSWER)
async def test_a_fault_after_an_answer_is_none_of_its_client(point: str, breakable: Breakable, client: Client) -> None:
    _, demand = breakable
    async with client.stream(Request(f"a prompt for {point}, then w")) as stream:
        text = ""
        async for answer in stream:
            if not text:
                demand.ask(point, "python memory")
            text += answer.content
    assert text == "xyz"
    await check_serving(client)
    assert demand.struck(point)


@pytest.mark.parametrize("fault", ["python memory", "mlx memory"])
async def test_want_of_memory_is_told_in_the_words_that_hosts_know(
    fault: str, breakable: Breakable, client: Client
) -> None:
    _, demand = breakable
    demand.ask("forward", fault)
    demand.ask("sample", fault)  # where it comes to when it has begun again
    _, error = await ask(client, Request("no memory for w"))
    text = f"RuntimeError: {NO_MEMORY}" if fault == "mlx memory" else "MemoryError"
    assert error == f"out of memory: {text}"
    await check_serving(client)


@pytest.mark.parametrize("fault", ["python memory", "mlx memory"])
@pytest.mark.parametrize("point", ["forward", "evaluate", "sample", "read", "page out layers"])
async def test_what_finds_no_memory_once_is_answered_all_the_same(
    point: str, fault: str, breakable: Breakable, client: Client
) -> None:
    _, demand = breakable
    demand.ask(point, fault)
    assert await ask(client, Request("memory for w")) == ("xyz", None)
    assert demand.struck(point)
    await check_serving(client)


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(("join", "sample together", "part samples"), id="some"),
        pytest.param(("try batches",), id="once"),  # which a process does but once
        pytest.param(MEETING, id="all", marks=pytest.mark.slow),
    ],
)
async def test_a_fault_where_answers_meet_or_part_ends_none_of_them(
    points: tuple[str, ...], start: SpawnModel, demand: Demand
) -> None:
    process = start(executable=FAULTY, environment=demand.environment)
    async with Client.of(process) as client:
        for point in points:
            demand.ask(point, "mlx memory")
            for _ in range(_WAVES):
                answers = await asyncio.gather(*(ask(client, request) for request, _ in WAVE))
                assert answers == [(text, None) for _, text in WAVE]
                if demand.struck(point):
                    break
            assert demand.struck(point), f"nothing came to {point!r}"
    assert not process.output.captured


async def test_faults_of_one_client_are_not_those_of_the_others(breakable: Breakable, client: Client) -> None:
    """Eight at once, and something breaks in one of them: the others are served as if nothing were."""
    _, demand = breakable
    first = asyncio.create_task(ask(client, Request("0", {"num_predict": 50})))
    await asyncio.sleep(0.05)
    others = [asyncio.create_task(ask(client, Request(f"{number} w"))) for number in range(7)]
    demand.ask("sample", "fault")
    answers = [await each for each in (first, *others)]
    assert sum(error is not None for _, error in answers) == 1
    assert all(error or text in ("xyz", "1234567890" * 5) for text, error in answers)
