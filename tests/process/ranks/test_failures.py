"""If one rank ends, stops or errs, all end, soon, and one line says why."""

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from scripts.tools.host.lib import Client, Process, Request, StatusError, StreamError
from scripts.tools.host.lib.generations import G
from tests.lib.patience import stretched
from tests.process.conftest import RANDOM, SpawnModel
from tests.process.ranks.conftest import ODD, children, ended, error_lines, followers

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
        await asyncio.wait_for(begun.wait(), stretched(30))
        yield client
        await asyncio.wait_for(reading, stretched(30))


def check_end(process: Process, pids: list[int], why: str, seconds: float) -> None:
    """Checks that all ranks end, for this reason."""
    assert process.wait(stretched(seconds)) == 1, process.output.text[-2000:]
    lines = error_lines(process)
    assert [*lines] == process.output.lines[-1:], process.output.text[-2000:]
    assert re.fullmatch(f"Error: {why}", lines[0]), lines
    assert ended(pids, 2)


async def test_a_follower_is_killed_while_nothing_is_to_do(start: SpawnModel) -> None:
    process = start(RANDOM, RANKS, generation=G)
    (follower,) = followers(process)
    os.kill(follower, signal.SIGKILL)
    check_end(process, [follower], f"{NAME} ended: killed by signal 9", 5)


async def test_the_follower_that_is_killed_is_named_whatever_the_others_say(start: SpawnModel, wide: Path) -> None:
    """What its end does to them, they may tell first."""
    process = start(RANDOM, ["--ranks", "4"], models_dir=wide, generation=G)
    pids = followers(process)
    async with answering(process):
        os.kill(pids[-1], signal.SIGKILL)
        why = rf"rank 3 \(process {pids[-1]}\) ended: killed by signal 9"
        await asyncio.to_thread(check_end, process, pids, why, 5)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda number: number.name)
async def test_a_follower_is_killed_in_an_answer(start: SpawnModel, number: signal.Signals) -> None:
    process = start(RANDOM, RANKS, generation=G)
    (follower,) = followers(process)
    async with answering(process):
        os.kill(follower, number)
        await asyncio.to_thread(check_end, process, [follower], f"{NAME} ended: killed by signal {number:d}", 5)


async def test_a_follower_stops_in_an_answer(start: SpawnModel) -> None:
    process = start(RANDOM, RANKS, generation=G)
    (follower,) = followers(process)
    async with answering(process) as client:
        os.kill(follower, signal.SIGSTOP)
        await asyncio.sleep(2)
        await asyncio.wait_for(client.status(), stretched(2))
        await asyncio.to_thread(check_end, process, [follower], f"{NAME}: nothing was heard of it for 10 s", 16)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "answering"])
async def test_a_leader_is_killed(start: SpawnModel, busy: bool) -> None:
    process = start(RANDOM, RANKS, generation=G)
    pids = followers(process)
    if busy:
        async with answering(process):
            process.kill()
    else:
        process.kill()
    assert ended(pids, 2)


async def test_a_leader_is_killed_at_any_moment_of_its_start(start: SpawnModel) -> None:
    for moment_s in (0.3, 0.8, 1.2, 1.5, 1.8, 2.2):
        process = start(RANDOM, RANKS, generation=G, ready=False)
        await asyncio.sleep(moment_s)
        pids = followers(process)
        process.kill()
        assert ended(pids, 3), f"after {moment_s} s"


async def test_a_leader_stops(start: SpawnModel) -> None:
    process = start(RANDOM, RANKS, generation=G)
    pids = followers(process)
    process.send_signal(signal.SIGSTOP)
    assert ended(pids, 15)
    process.send_signal(signal.SIGCONT)
    check_end(process, pids, f"{NAME} ended: exit status 0", 5)


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
async def test_a_signal_to_all_ranks_ends_them_quietly(start: SpawnModel, number: signal.Signals) -> None:
    process = start(RANDOM, RANKS, generation=G)
    pids = followers(process)
    for pid in pids:
        os.kill(pid, number)
    await asyncio.sleep(1)
    process.send_signal(number)
    assert process.wait(stretched(10)) == -number
    assert not error_lines(process)
    assert ended(pids, 2)


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ("token", rf"{DISAGREE} tokens \[1, \d+\]; this rank: tokens \[1, \d+\]"),
        ("position", rf"{DISAGREE} forward \[1, \d+, 0\]; this rank: forward \[1, \d+, 1\]"),
        ("memory", rf"{NAME}: out of memory: RuntimeError: \[malloc\] Unable to allocate 12 bytes\."),
        ("leader", r"rank 0: out of memory: RuntimeError: \[malloc\] Unable to allocate 12 bytes\."),
        ("closes", f"{NAME} ended: its connection was closed"),
        ("garbage", f"{NAME}: the other side does not speak the protocol of ranks"),
    ],
    ids=["token", "position", "memory", "leader", "closes", "garbage"],
)
async def test_a_rank_errs_in_an_answer(start: SpawnModel, odd: str, why: str) -> None:
    process = start(RANDOM, RANKS, executable=ODD, environment={"ODD": odd}, generation=G)
    pids = followers(process)
    async with Client.of(process) as client:
        with pytest.raises((StatusError, StreamError)):
            await client.complete(LONG)
    check_end(process, pids, why, 5)


async def test_a_follower_dies_before_it_joins(start: SpawnModel) -> None:
    process = start(RANDOM, RANKS, executable=ODD, environment={"ODD": "dies"}, generation=G, ready=False)
    check_end(process, [], f"{NAME} ended: exit status 7", 20)


async def test_a_follower_dies_while_the_ranks_join(start: SpawnModel) -> None:
    process = start(RANDOM, RANKS, executable=ODD, environment={"ODD": "unwilling"}, generation=G, ready=False)
    until_s = time.monotonic() + stretched(20)
    while "guard.py" not in " ".join(children(process).values()) and time.monotonic() < until_s:
        await asyncio.sleep(0.05)
    (follower,) = followers(process)
    os.kill(follower, signal.SIGKILL)
    assert process.wait(stretched(5)) is not None
    (line,) = error_lines(process)
    assert re.fullmatch(f"Error: {NAME} ended while the ranks were joined", line)
