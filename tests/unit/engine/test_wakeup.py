"""The wake-up of the event loop: one call for each ring, and none is lost."""

import asyncio
import ctypes
import threading

import pytest

from runner.engine import events as wakeup
from runner.engine.events import Wakeup


async def heard(one: Wakeup, times: int) -> list[int]:
    """Rings so many times, each after the last call. Returns the threads of the calls."""
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


async def test_every_ring_calls_back_on_the_event_loop() -> None:
    assert await heard(Wakeup(asyncio.get_running_loop()), 20) == [threading.get_ident()] * 20


async def test_a_failed_write_falls_back_to_an_ordinary_call(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Wakeup(asyncio.get_running_loop())
    monkeypatch.setattr(wakeup, "_write", lambda end, data, size: -1)
    assert await heard(one, 3) == [threading.get_ident()] * 3


def test_ringing_keeps_the_gil() -> None:
    keeps = 0x4  # what ctypes calls FUNCFLAG_PYTHONAPI
    assert wakeup._write._flags_ & keeps
    assert not ctypes.CDLL(None).write._flags_ & keeps
