"""The bell: it is heard on the event loop, once for each time that it is rung, and it is never lost."""

import asyncio
import ctypes
import threading

import pytest

from runner.engine.platform import wakeup
from runner.engine.platform.wakeup import Wakeup


async def heard(one: Wakeup, times: int) -> list[int]:
    """The threads on which it was answered, rung so often, each time after the last answer."""
    threads: list[int] = []
    answered = asyncio.Event()

    def answer() -> None:
        threads.append(threading.get_ident())
        answered.set()

    for _ in range(times):
        await asyncio.get_running_loop().run_in_executor(None, one.wake, answer)
        async with asyncio.timeout(30):
            await answered.wait()
        answered.clear()
    return threads


async def test_it_is_answered_on_the_event_loop_each_time() -> None:
    assert await heard(Wakeup(asyncio.get_running_loop()), 20) == [threading.get_ident()] * 20


async def test_one_that_cannot_ring_calls_in_the_ordinary_way(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Wakeup(asyncio.get_running_loop())
    monkeypatch.setattr(wakeup, "_write", lambda end, data, size: -1)
    assert await heard(one, 3) == [threading.get_ident()] * 3


async def test_an_idle_loop_is_not_called() -> None:
    called = 0

    def answer() -> None:
        nonlocal called
        called += 1

    one = Wakeup(asyncio.get_running_loop())
    one.wake(answer)
    for _ in range(5):
        await asyncio.sleep(0.001)
    assert called == 1


def test_ringing_keeps_the_gil() -> None:
    keeps = 0x4  # what ctypes calls FUNCFLAG_PYTHONAPI
    assert wakeup._write._flags_ & keeps
    assert not ctypes.CDLL(None).write._flags_ & keeps
