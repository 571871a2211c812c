"""The runner's output may be full, closed, gone or not a pipe: requests continue, and lines stay whole."""

import fcntl
import http.client
import os
import pty
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from scripts.tools.conformance.assertions import ALPHABET
from scripts.tools.host.lib import rss_bytes
from tests.process.conftest import FAULTY, linux_only
from tests.process.faults.fault_control import FaultControl
from tests.process.faults.raw_process import RawProcess, raw_process

LINE = re.compile(r"time=\S+ level=[A-Z]+ source=\S+:\d+ msg=.*")
F_SETPIPE_SZ = 1031
_PIPE_BYTES = 8192


def check_serving(runner: RawProcess) -> None:
    assert runner.answer("Hi") == ALPHABET
    assert runner.get("/v1/status") == 200


@contextmanager
def small_pipe() -> Iterator[tuple[int, int]]:
    """Yields the two ends of a pipe of 8 KiB."""
    read, write = os.pipe()
    fcntl.fcntl(write, F_SETPIPE_SZ, _PIPE_BYTES)
    try:
        yield read, write
    finally:
        for end in (read, write):
            with suppress(OSError):
                os.close(end)


def drain(read: int) -> bytes:
    """Returns everything that is in the pipe."""
    os.set_blocking(read, False)
    found = b""
    while True:
        try:
            chunk = os.read(read, 65536)
        except BlockingIOError:
            return found
        if not chunk:
            return found
        found += chunk


def fill(write: int) -> None:
    """Fills the pipe."""
    os.set_blocking(write, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)


@linux_only
def test_a_host_that_stops_reading_delays_nothing_and_later_reads_whole_lines(
    models_dir: Path, faults: FaultControl
) -> None:
    environment = {**os.environ, **faults.environment, "OLLAMA_DEBUG": "2"}
    with (
        small_pipe() as (read, write),
        raw_process(models_dir, stdout=write, stderr=write, executable=FAULTY, environment=environment) as runner,
    ):
        os.close(write)
        runner.wait_ready()
        resting = rss_bytes(runner.process.pid)
        clients = [threading.Thread(target=check_serving, args=(runner,)) for _ in range(40)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(60)
        assert not any(client.is_alive() for client in clients)
        for _ in range(10):
            faults.arm("decode text", "fault")  # logs a line with a whole traceback
            assert runner.answer("Hi") != ALPHABET
        assert rss_bytes(runner.process.pid) - resting < 64 << 20
        first = drain(read)
        assert len(first) > _PIPE_BYTES - 4096, "the pipe was full"
        check_serving(runner)
        second = b""
        deadline = time.monotonic() + 60
        while not second and time.monotonic() < deadline:
            time.sleep(0.1)
            second = drain(read)
        lines = [*first.decode().split("\n")[:-1], *second.decode().split("\n")[:-1]]
        assert first.endswith(b"\n")
        assert second.endswith(b"\n"), "lines are written again as soon as there is room"
        assert all(LINE.fullmatch(line) for line in lines)
        faults.arm("sample", "exit")
        with pytest.raises((OSError, http.client.HTTPException)):
            runner.answer("Hi")  # its stream breaks off
        assert runner.process.wait(60) == 1
        assert drain(read).endswith(b"\nError: the engine died: SystemExit: Error: mlx: enough\n")


@linux_only
def test_a_crash_does_not_wait_for_a_host_that_stops_reading(models_dir: Path) -> None:
    with small_pipe() as (_, write), raw_process(models_dir, stdout=write, stderr=write) as runner:
        runner.wait_ready()
        fill(write)
        runner.process.send_signal(signal.SIGSEGV)
        assert runner.process.wait(60) == -signal.SIGSEGV


@linux_only
def test_a_full_disk_for_the_log_does_not_stop_it(models_dir: Path) -> None:
    environment = {**os.environ, "OLLAMA_DEBUG": "2"}
    with (
        Path("/dev/full").open("wb") as output,
        raw_process(models_dir, stdout=output, stderr=output, words=["runner"], environment=environment) as runner,
    ):
        runner.wait_ready()
        check_serving(runner)
        assert runner.status is None


def test_a_runner_started_by_a_host_ends_with_its_terminal(models_dir: Path) -> None:
    ours, theirs = pty.openpty()
    with raw_process(models_dir, stdout=theirs, stderr=theirs, words=["runner"]) as runner:
        os.close(theirs)
        runner.wait_ready()
        check_serving(runner)
        assert b"msg=listening" in os.read(ours, 65536)
        os.close(ours)
        assert runner.process.wait(60) == 1


def test_it_serves_without_stdout_and_stderr(models_dir: Path) -> None:
    def close() -> None:
        for stream in (0, 1, 2):
            os.close(stream)

    with raw_process(models_dir, stdout=None, stderr=None, words=["runner"], before=close) as runner:
        runner.wait_ready()
        check_serving(runner)
