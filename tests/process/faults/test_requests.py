"""A fault in one request is reported to its client only, and the process continues (conformance case 51, at all
points)."""

import asyncio
import json

import pytest

from scripts.tools.conformance.fault_points import CONCURRENT_ONLY, DRAFTED_ONLY, FATAL, NO_MEMORY, POINTS
from scripts.tools.host.lib import OUT_OF_MEMORY, Client, Process, Request, StatusError
from tests.process.conftest import FAULTY, SpawnModel
from tests.process.faults.fault_control import FaultControl

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
NOT_ALONE = CONCURRENT_ONLY | DRAFTED_ONLY | {"drop", "return to prefill", "trim", "truncate"}
"""Points that requests served one by one never reach with a model of plain keys and values."""

MEETING = (
    *("join", "join rows", "join layers", "join samples", "join samplers", "sample together", "release samplers"),
    *("part", "part rows", "part layers", "part samples"),
)
"""Points at which requests join and leave batches."""
WAVE = [(Request("0", {"num_predict": length}), ("1234567890" * 32)[:length]) for length in (320, 240, 160)]
_WAVES = 5

Breakable = tuple[Process, FaultControl]


async def ask(client: Client, request: Request) -> tuple[str, str | None]:
    """Returns the text of an answer and the error that ended it, if any, after checking that hosts can read it."""
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
    """Checks that the next answers are right, one of them with a cached prefix."""
    assert await ask(client, Request("Hi")) == (ALPHABET, None)
    assert await ask(client, Request("the same beginning, then a", {"num_predict": 5})) == ("bcdef", None)


async def test_a_fault_at_any_point_ends_one_request(breakable: Breakable, client: Client) -> None:
    _, faults = breakable
    long = "a prompt of more bytes than the cache may keep: " + "q" * 1500
    broken = set()
    for number, point in enumerate(point for point in POINTS if point not in NOT_ALONE | set(FATAL)):
        faults.arm(point, "fault")
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
            if faults.raised(point):
                break
        assert faults.raised(point), f"nothing came to {point!r}"
        await check_serving(client)
    assert broken >= {"forward", "sample", "record", "decode text", "spell token", "count"}


@pytest.mark.parametrize("point", IN_DECODE)
async def test_a_fault_in_the_middle_of_an_answer_ends_it_there(
    point: str, breakable: Breakable, client: Client
) -> None:
    _, faults = breakable
    response = await client.post_completion(Request("0"))
    lines = []
    async for line in response.content:  # raises if the stream breaks off
        lines.append(json.loads(line))
        if len(lines) == 3:
            faults.arm(point, "fault")
    *before, last = lines
    assert last["Error"]["StatusCode"] == 500
    assert "a place that has no memory" in last["Error"]["error"]
    assert len(before) >= 3
    assert not any(line.get("Error") or line["Done"] for line in before)
    assert "".join(line["Content"] for line in before) == ("1234567890" * len(before))[: len(before)]
    await check_serving(client)


@pytest.mark.parametrize("point", AFTER_THE_ANSWER)
async def test_a_fault_after_an_answer_does_not_reach_its_client(
    point: str, breakable: Breakable, client: Client
) -> None:
    _, faults = breakable
    async with client.stream(Request(f"a prompt for {point}, then w")) as stream:
        text = ""
        async for answer in stream:
            if not text:
                faults.arm(point, "python memory")
            text += answer.content
    assert text == "xyz"
    await check_serving(client)
    assert faults.raised(point)


@pytest.mark.parametrize("fault", ["python memory", "mlx memory"])
async def test_running_out_of_memory_is_reported_in_words_that_hosts_know(
    fault: str, breakable: Breakable, client: Client
) -> None:
    _, faults = breakable
    faults.arm("forward", fault)
    faults.arm("sample", fault)  # hits the second attempt
    _, error = await ask(client, Request("no memory for w"))
    text = f"RuntimeError: {NO_MEMORY}" if fault == "mlx memory" else "MemoryError"
    assert error == f"out of memory: {text}"
    await check_serving(client)


@pytest.mark.parametrize("fault", ["python memory", "mlx memory"])
@pytest.mark.parametrize("point", ["forward", "evaluate", "sample", "read", "page out layers"])
async def test_a_request_that_ran_out_of_memory_once_is_still_answered(
    point: str, fault: str, breakable: Breakable, client: Client
) -> None:
    _, faults = breakable
    faults.arm(point, fault)
    assert await ask(client, Request("memory for w")) == ("xyz", None)
    assert faults.raised(point)
    await check_serving(client)


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(("join", "sample together", "part samples"), id="some"),
        pytest.param(("try batches",), id="once"),  # happens once in a process
        pytest.param(MEETING, id="all", marks=pytest.mark.slow),
    ],
)
async def test_a_fault_while_a_batch_is_joined_or_left_ends_no_request(
    points: tuple[str, ...], start: SpawnModel, faults: FaultControl
) -> None:
    process = start(executable=FAULTY, environment=faults.environment)
    async with Client.of(process) as client:
        for point in points:
            faults.arm(point, "mlx memory")
            for _ in range(_WAVES):
                answers = await asyncio.gather(*(ask(client, request) for request, _ in WAVE))
                assert answers == [(text, None) for _, text in WAVE]
                if faults.raised(point):
                    break
            assert faults.raised(point), f"nothing came to {point!r}"
    assert not process.output.captured


async def test_a_fault_of_one_request_does_not_affect_seven_others(breakable: Breakable, client: Client) -> None:
    """Eight requests run at once and one of them fails; the others are answered in full."""
    _, faults = breakable
    first = asyncio.create_task(ask(client, Request("0", {"num_predict": 50})))
    await asyncio.sleep(0.05)
    others = [asyncio.create_task(ask(client, Request(f"{number} w"))) for number in range(7)]
    faults.arm("sample", "fault")
    answers = [await each for each in (first, *others)]
    assert sum(error is not None for _, error in answers) == 1
    assert all(error or text in ("xyz", "1234567890" * 5) for text, error in answers)
