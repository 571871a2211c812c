"""Assertions whose messages say what was wrong without pytest's help."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from typing import TypeVar

from scripts.tools.conformance.runners import Target, caught
from scripts.tools.conformance.scripted_model import CONTEXT
from scripts.tools.host.lib import Client, Process, Reply, Request, StatusError, Stream

T = TypeVar("T")

ALPHABET = "jklmnopqrstuvwxyz"
"""The scripted model's answer to "Hi"."""
ENDLESS = Request("0")
"""Digits until the context is full: thousands of tokens."""
GONE_S = 30.0


def expect(what: str, got: object, wanted: object) -> None:
    """Raises an `AssertionError` that tells both sides unless they are equal."""
    if got != wanted:
        raise AssertionError(f"{what}: {got!r}, wanted {wanted!r}")


def refused(reply: Reply, text: str) -> None:
    """The reply is a 400 with this text. Behind `Bad Request` the reason may follow, in the same line."""
    words, colon, why = reply.text.strip().partition(": ")
    found = words if words == "Bad Request" and why and "\n" not in why else words + colon + why
    expect("status and text", (reply.status, found), (400, text))
    kind = reply.headers.get("content-type", "")
    assert kind.startswith("text/plain"), f"the content type of an error is {kind!r}"


async def refusal(answering: Awaitable[object]) -> str:
    """Returns the text of the 400 that a request gets. Fails if it is answered."""
    try:
        await answering
    except StatusError as error:
        expect(f"status ({error})", error.status, 400)
        return str(error)
    raise AssertionError("it was answered")


def answered(reply: Reply) -> bytes:
    """Returns the body of a reply, which must be a 200."""
    expect(f"status ({reply.text.strip()[:100]})", reply.status, 200)
    return reply.body


def text_of(reply: Reply) -> str:
    """The text of a whole stream. Fails unless its last line, and no other, is done."""
    lines = [json.loads(line) for line in answered(reply).splitlines()]
    done = [number for number, line in enumerate(lines, 1) if line.get("Done")]
    expect(f"which of {len(lines)} lines are done", done, [len(lines)])
    return "".join(line.get("Content") or "" for line in lines)


def quiet(process: Process) -> None:
    """It wrote nothing that hosts take for an error, and no traceback."""
    expect("what hosts take for an error", caught(process), [])
    for word in ("Traceback", "KeyboardInterrupt"):
        assert word not in process.output.text, f"it wrote {word!r}"


@asynccontextmanager
async def generating(client: Client) -> AsyncIterator[Stream]:
    """Inside the block an endless completion of this client is running, its first line read."""
    async with client.stream(ENDLESS) as stream:
        async for answer in stream:
            assert not answer.done, "the endless completion ended at once"
            break
        yield stream


def long_prompt(target: Target) -> str:
    """A prompt that nearly fills the context, and that no process has seen."""
    start = target.runners.unheard()
    return start + "q" * (CONTEXT - 100 - len(start))


async def drain(stream: Stream) -> None:
    async for _ in stream:
        pass


async def gone(task: asyncio.Task[object]) -> None:
    """Cancels the task and waits for it: its connection is closed then. Raises `TimeoutError` where it goes on."""
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=GONE_S)  # which a second cancellation ends, whatever the task does
    if not done:
        raise TimeoutError("a request goes on though it was cancelled")
    if not task.cancelled():
        task.exception()  # nobody asks for it


@asynccontextmanager
async def under_way(doing: Coroutine[None, None, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Inside the block this is being done, unless it is over; its end cancels the rest."""
    task = asyncio.create_task(doing)
    try:
        yield task
    finally:
        await gone(task)
