"""The stand-in runner, as an executable of several words, and a bound for every test."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

BOUND_S = 120
STAND_IN = (sys.executable, "-I", "-S", str(Path(__file__).with_name("stand_in.py")))


@pytest.fixture(autouse=True)
async def bounded() -> AsyncIterator[None]:
    """A test that awaits for too long is cancelled, and shows where."""
    loop = asyncio.get_running_loop()

    def cancel() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel("too long")

    timer = loop.call_later(BOUND_S, cancel)
    yield
    timer.cancel()
