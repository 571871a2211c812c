"""A fault in one request is reported to its client only, and the process continues. `test_any_call` has all points."""

import asyncio
import json

import pytest

from scripts.tools.host.lib import Client, Process, Request, StatusError
from tests.process.faults.fault_control import FaultControl

ALPHABET = "jklmnopqrstuvwxyz"
IN_DECODE = ("forward", "sample", "record", "decode text")
AFTER_THE_ANSWER = ("close generation", "close session", "keep", "evaluate layers")


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
