"""If one rank ends, stops or errs, all end, soon, and one line says why."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from scripts.tools.host.lib import Client, Process, Request, StatusError, StreamError
from scripts.tools.host.lib.generations import G
from tests.process.conftest import RANDOM, SpawnModel
from tests.process.ranks.conftest import ODD, WAIT_S, children, ended, error_lines, followers

RANKS = ("--ranks", "2")
LONG = Request("so many words about zebras " * 3, {"num_predict": 3000, "temperature": 1.0, "seed": 3})
NAME = r"rank 1 \(process \d+\)"
DISAGREE = rf"{NAME}: the ranks disagree: slice \d+: the leader has:"


@asynccontextmanager
async def answering(process: Process, request: Request = LONG) -> AsyncIterator[Client]:
    """A client that reads an answer, which is going on."""
    async with Client.of(process) as client:
        begun = asyncio.Event()

        async def read() -> None:
            try:
                async with client.stream(request) as stream:
                    async for _ in stream:
                        begun.set()
            except (StatusError, StreamError):
                pass

        reading = asyncio.create_task(read())
        await asyncio.wait_for(begun.wait(), WAIT_S)
        yield client
        await asyncio.wait_for(reading, WAIT_S)


def check_end(process: Process, pids: list[int], why: str) -> None:
    """Checks that all ranks end, for this reason."""
    assert process.wait(WAIT_S) == 1, process.output.text[-2000:]
    lines = error_lines(process)
    assert [*lines] == process.output.lines[-1:], process.output.text[-2000:]
    assert re.fullmatch(f"Error: {why}", lines[0]), lines
    assert ended(pids)


async def test_the_follower_that_is_killed_is_named_whatever_the_others_say(start: SpawnModel, wide: Path) -> None:
    """What its end does to them, they may tell first."""
    process = start(RANDOM, ["--ranks", "4"], models_dir=wide, generation=G)
    pids = followers(process)
    async with answering(process):
        os.kill(pids[-1], signal.SIGKILL)
        why = rf"rank 3 \(process {pids[-1]}\) ended: killed by signal 9"
        await asyncio.to_thread(check_end, process, pids, why)


async def test_a_follower_is_killed_in_an_answer(start: SpawnModel) -> None:
    process = start(RANDOM, RANKS, generation=G)
    (follower,) = followers(process)
    async with answering(process):
        os.kill(follower, signal.SIGKILL)
        await asyncio.to_thread(check_end, process, [follower], f"{NAME} ended: killed by signal 9")


async def test_a_leader_is_killed(start: SpawnModel) -> None:
    process = start(RANDOM, RANKS, generation=G)
    pids = followers(process)
    async with answering(process):
        process.kill()
    assert ended(pids)


async def test_a_leader_is_killed_at_any_moment_of_its_start(start: SpawnModel) -> None:
    for moment_s in (0.3, 1.2, 1.8):
        process = start(RANDOM, RANKS, generation=G, ready=False)
        await asyncio.sleep(moment_s)
        pids = followers(process)
        process.kill()
        assert ended(pids), f"after {moment_s} s"


async def test_all_ranks_stop_and_go_on(start: SpawnModel) -> None:
    """As by Ctrl-Z in a terminal."""
    process = start(RANDOM, RANKS, generation=G)
    pids = followers(process)
    for pid in (process.pid, *pids):
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(12)
    for pid in (process.pid, *pids):
        os.kill(pid, signal.SIGCONT)
    await asyncio.sleep(3)  # whoever takes another one for gone ends now
    async with Client.of(process) as client:
        assert (await client.complete(Request("a", {"num_predict": 3}))).final.done


async def test_a_signal_to_all_ranks_ends_them_quietly(start: SpawnModel) -> None:
    process = start(RANDOM, RANKS, generation=G)
    pids = followers(process)
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    await asyncio.sleep(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == -signal.SIGINT
    assert not error_lines(process)
    assert ended(pids)


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ("token", rf"{DISAGREE} tokens \[1, \d+\]; this rank: tokens \[1, \d+\]"),
        ("position", rf"{DISAGREE} forward \[1, \d+, 0\]; this rank: forward \[1, \d+, 1\]"),
        ("memory", rf"{NAME}: out of memory: RuntimeError: \[malloc\] Unable to allocate 12 bytes\."),
        ("leader", r"rank 0: out of memory: RuntimeError: \[malloc\] Unable to allocate 12 bytes\."),
    ],
    ids=["token", "position", "memory", "leader"],
)
async def test_a_rank_errs_in_an_answer(start: SpawnModel, odd: str, why: str) -> None:
    process = start(RANDOM, RANKS, executable=ODD, environment={"ODD": odd}, generation=G)
    pids = followers(process)
    async with Client.of(process) as client:
        with pytest.raises((StatusError, StreamError)):
            await client.complete(LONG)
    check_end(process, pids, why)


async def test_a_follower_dies_while_the_ranks_join(start: SpawnModel) -> None:
    process = start(RANDOM, RANKS, executable=ODD, environment={"ODD": "unwilling"}, generation=G, ready=False)
    async with asyncio.timeout(WAIT_S):
        while "join_watchdog.py" not in " ".join(children(process).values()):
            await asyncio.sleep(0.05)
    (follower,) = followers(process)
    os.kill(follower, signal.SIGKILL)
    assert process.wait(WAIT_S) is not None
    (line,) = error_lines(process)
    assert re.fullmatch(f"Error: {NAME} ended while the ranks were joined", line)
