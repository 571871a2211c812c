"""`mlx-runner top` as a process. tests/process/test_stats.py shows a real runner with it."""

import asyncio
import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from scripts.tools.conformance.this_runner import RUNNER
from tests.lib.page_stand_in import STATS, StandIn


@pytest.fixture
async def stand_in() -> AsyncIterator[StandIn]:
    async with StandIn() as stand_in:
        yield stand_in


async def test_without_rich_it_says_what_to_install(stand_in: StandIn) -> None:
    code = (
        "import sys; sys.modules['rich'] = sys.modules['rich.console'] = None\n"
        f"from runner.app import run_process; run_process(['top', '{stand_in.port}'])"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=-1, stderr=-1)
    out, err = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    assert b"pip install 'rich" in err
    assert f"curl http://127.0.0.1:{stand_in.port}/v1/stats".encode() in err


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "40"}
        self.process = subprocess.Popen(
            [*RUNNER, "top", *words], stdin=slave, stdout=slave, stderr=slave, env=environment
        )
        os.close(slave)
        self.seen = b""

    async def until(self, words: bytes) -> None:
        """Reads until it says these words, and forgets what was before them. EOFError if it never does."""
        while words not in self.seen:
            try:
                data = await asyncio.to_thread(os.read, self._master, 65536)
            except OSError:
                data = b""
            if not data:
                raise EOFError(self.seen)
            self.seen += data
        self.seen = self.seen.partition(words)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


async def test_on_a_terminal_it_follows_the_runner_past_its_end_until_ctrl_c(stand_in: StandIn) -> None:
    terminal = Terminal("--port", str(stand_in.port))
    try:
        await terminal.until(b"\x1b[?1049h")  # another screen, as `top` and `less` take one
        await terminal.until(b"demo:latest")
        stand_in.tell(replace(STATS, model="second"))
        await terminal.until(b"second")
        await stand_in.end()
        await terminal.until(b"These are the last figures, from ")
        stand_in.stats = replace(STATS, model="third")
        await stand_in.begin()
        await terminal.until(b"third")
        terminal.process.send_signal(signal.SIGINT)
        await terminal.until(b"\x1b[?1049l")
        assert await asyncio.to_thread(terminal.process.wait) == 0
    finally:
        terminal.close()
