"""What the runner writes its lines to may be full, closed, gone or no pipe at all: requests go on, lines stay whole."""

import fcntl
import os
import pty
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from scripts.tools.host.lib.usage import rss_bytes
from tests.process.conftest import FAULTY
from tests.process.faults.bare import Bare, bare
from tests.process.faults.demand import Demand

ALPHABET = "jklmnopqrstuvwxyz"
LINE = re.compile(r"time=\S+ level=[A-Z]+ source=\S+:\d+ msg=.*")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="F_SETPIPE_SZ, /dev/full, /proc")
F_SETPIPE_SZ = 1031
_PIPE_BYTES = 8192


def check_serving(runner: Bare) -> None:
    assert runner.answer("Hi") == ALPHABET
    assert runner.get("/v1/status") == 200


@contextmanager
def small_pipe() -> Iterator[tuple[int, int]]:
    """The ends of a pipe that is soon full."""
    read, write = os.pipe()
    fcntl.fcntl(write, F_SETPIPE_SZ, _PIPE_BYTES)
    try:
        yield read, write
    finally:
        for end in (read, write):
            with suppress(OSError):
                os.close(end)


def drain(read: int) -> bytes:
    """Everything that is in the pipe."""
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
    """Leaves no room in the pipe."""
    os.set_blocking(write, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)


@linux_only
def test_a_host_that_stops_reading_holds_up_nothing_and_finds_whole_lines(models_dir: Path, demand: Demand) -> None:
    environment = {**os.environ, **demand.environment, "OLLAMA_DEBUG": "2"}
    with (
        small_pipe() as (read, write),
        bare(models_dir, stdout=write, stderr=write, executable=FAULTY, environment=environment) as runner,
    ):
        os.close(write)
        runner.wait_ready()
        resting = rss_bytes(runner.process.pid)
        clients = [threading.Thread(target=check_serving, args=(runner,)) for _ in range(40)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(30)
        assert not any(client.is_alive() for client in clients)
        for _ in range(10):
            demand.ask("decode text", "fault")  # a line with a whole traceback in it
            assert runner.answer("Hi") != ALPHABET
        assert rss_bytes(runner.process.pid) - resting < 64 << 20
        first = drain(read)
        assert len(first) > _PIPE_BYTES - 4096, "it was full"
        check_serving(runner)
        second = b""
        deadline = time.monotonic() + 10
        while not second and time.monotonic() < deadline:
            time.sleep(0.1)
            second = drain(read)
        lines = [*first.decode().split("\n")[:-1], *second.decode().split("\n")[:-1]]
        assert first.endswith(b"\n")
        assert second.endswith(b"\n"), "lines come again as soon as there is room"
        assert all(LINE.fullmatch(line) for line in lines)
        demand.ask("sample", "exit")
        runner.answer_nothing("Hi")
        assert runner.process.wait(10) == 1
        assert drain(read).endswith(b"\nError: the engine died: SystemExit: Error: mlx: enough\n")


@linux_only
def test_a_host_that_stops_reading_does_not_keep_a_dying_runner(models_dir: Path, demand: Demand) -> None:
    environment = {**os.environ, **demand.environment, "OLLAMA_DEBUG": "2"}
    with (
        small_pipe() as (_, write),
        bare(models_dir, stdout=write, stderr=write, executable=FAULTY, environment=environment) as runner,
    ):
        runner.wait_ready()
        fill(write)
        demand.ask("sample", "exit")
        runner.answer_nothing("Hi")
        assert runner.process.wait(10) == 1


@linux_only
def test_a_crash_does_not_wait_for_a_host_that_stops_reading(models_dir: Path) -> None:
    with small_pipe() as (_, write), bare(models_dir, stdout=write, stderr=write) as runner:
        runner.wait_ready()
        fill(write)
        runner.process.send_signal(signal.SIGSEGV)
        assert runner.process.wait(10) == -signal.SIGSEGV


@contextmanager
def _opened(path: str) -> Iterator[int]:
    output = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        yield output
    finally:
        os.close(output)


def _serves_with(models_dir: Path, output: int) -> None:
    environment = {**os.environ, "OLLAMA_DEBUG": "2"}
    with bare(models_dir, stdout=output, stderr=output, words=["runner"], environment=environment) as runner:
        runner.wait_ready()
        check_serving(runner)
        assert runner.status is None


@linux_only
def test_a_full_disk_behind_its_lines_is_no_reason_to_stop(models_dir: Path) -> None:
    with _opened("/dev/full") as output:
        _serves_with(models_dir, output)


def test_lines_go_to_a_file_one_after_the_other(models_dir: Path, tmp_path: Path) -> None:
    with _opened(str(tmp_path / "log")) as output:
        _serves_with(models_dir, output)
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) > 4
    assert all(LINE.fullmatch(line) for line in lines)


def test_lines_go_to_a_terminal_and_its_end_is_the_end_of_a_hosts_runner(models_dir: Path) -> None:
    ours, theirs = pty.openpty()
    with bare(models_dir, stdout=theirs, stderr=theirs, words=["runner"]) as runner:
        os.close(theirs)
        runner.wait_ready()
        check_serving(runner)
        assert b"msg=listening" in os.read(ours, 65536)
        os.close(ours)
        assert runner.process.wait(5) == 1


def test_without_outputs_it_serves_all_the_same(models_dir: Path) -> None:
    def close() -> None:
        for stream in (0, 1, 2):
            os.close(stream)

    with bare(models_dir, stdout=None, stderr=None, words=["runner"], before=close) as runner:
        runner.wait_ready()
        check_serving(runner)


def test_started_by_hand_it_outlives_whoever_read_its_lines(models_dir: Path) -> None:
    read, write = os.pipe()
    with bare(models_dir, stdout=write, stderr=write) as runner:
        os.close(write)
        runner.wait_ready()
        os.close(read)
        for _ in range(3):
            check_serving(runner)
        assert runner.status is None
