"""Any value of `Format` is answered or refused within its limits, and other requests are not affected."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic

from tests.lib.hostile_formats import FORMATS
from tests.process.hostile.victim import PATIENCE_S, Victim, completion, post, status_of

MOST_GAP_S = 2.0
"""The longest gap allowed in a concurrent stream, counted at most as the process's own processor time: much longer than
usual, much shorter than these formats take."""
KEPT = 10
"""Descriptors of eight workers that wait for the same format again, and of the process that forks them."""
MODEST = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}


def asking(wanted: object, prompt: str = "7", num_predict: int = 12) -> bytes:
    return completion(json.dumps({"Prompt": prompt, "Format": wanted, "Options": {"num_predict": num_predict}}))


def told(answer: bytes) -> str:
    """Returns the reason why a format was refused or ended early, if it was. Fails if the response is no answer."""
    status, body = status_of(answer), answer.partition(b"\r\n\r\n")[2].decode()
    assert status in (200, 400), answer[:300]
    if status == 400:
        return body
    last = [json.loads(line) for line in body.splitlines() if line.startswith("{")][-1]
    assert last.get("Done") or last.get("Error"), last
    return str(last["Error"]["error"] if last.get("Error") else "")


def workers(victim: Victim) -> int:
    """Counts the worker processes, whether they compile or follow a format or wait for the next answer."""
    count = 0
    for path in Path(f"/proc/{victim.process.pid}/task/{victim.process.pid}/children").read_text().split():
        with suppress(OSError):
            children = Path(f"/proc/{path}/task/{path}/children").read_text().split()
            count += sum("State:\tZ" not in Path(f"/proc/{child}/status").read_text() for child in children)
    return count


@asynccontextmanager
async def flowing(victim: Victim) -> AsyncIterator[None]:
    """Keeps an answer without a format and tokenize requests running inside the block."""
    gaps: list[float] = []
    over = asyncio.Event()
    reader, writer = await victim.open()
    writer.write(completion(json.dumps({"Prompt": "0", "Options": {"num_predict": 60_000, "draft_num_predict": 1}})))
    await reader.readuntil(b'"Done":false')

    async def read() -> None:
        before, computed = monotonic(), victim.cpu_s()
        while not over.is_set():
            assert await reader.read(1 << 16), "it ended by itself"
            gaps.append(min(monotonic() - before, victim.cpu_s() - computed))
            before, computed = monotonic(), victim.cpu_s()

    async def tokenize() -> None:
        while not over.is_set():
            async with asyncio.timeout(PATIENCE_S):
                assert status_of(await victim.exchange(post("/v1/tokenize", b"abc"))) == 200
            await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(read())
        tasks.create_task(tokenize())
        yield
        over.set()
    writer.transport.abort()
    assert len(gaps) > 2
    assert max(gaps) < MOST_GAP_S


async def test_all_of_them_at_once_do_not_delay_other_requests(victim: Victim) -> None:
    async with victim.storm(kept=KEPT), flowing(victim):
        answers = await asyncio.gather(
            *[victim.exchange(asking(wanted), timeout_s=120.0) for wanted in FORMATS.values()]
        )
    reasons = {name: told(answer) for name, answer in zip(FORMATS, answers, strict=True)}
    for name in ("a large divisor", "another large divisor", "an intersection"):
        # the last one if the machine is busy: the oldest gives way while more are there than may be
        refusals = "compiling it takes longer than", "of memory", "while others wait"
        assert any(each in reasons[name] for each in refusals), reasons[name]


async def test_a_disconnect_ends_the_compilation(victim: Victim) -> None:
    assert told(await victim.exchange(asking(MODEST))) == ""
    kept, before = workers(victim), -1
    while kept != before:  # its worker comes to the others that are kept, and one of these may go
        await asyncio.sleep(0.5)
        kept, before = workers(victim), kept
    async with victim.storm(kept=KEPT):
        leaving = [await victim.open() for _ in range(4)]
        for _, writer in leaving:
            writer.write(asking(FORMATS["free texts that branch"]))
        async with asyncio.timeout(PATIENCE_S):
            while workers(victim) < kept + 4:
                await asyncio.sleep(0.01)
        for _, writer in leaving:
            writer.transport.abort()
        async with asyncio.timeout(PATIENCE_S):
            while workers(victim) > kept:
                await asyncio.sleep(0.01)
