"""The rules of `tests/conftest.py`: every test ends and leaves nothing behind; and the linters beside the tests."""

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from runner import device
from tests import linters
from tests.lib.leftovers import holdings
from tests.lib.patience import stretched

_ROOT = Path(__file__).parents[2]
_FAULTS = """
import asyncio, socket, subprocess, tempfile, threading, time
from pathlib import Path
import pytest
from tests.lib import leftovers

leftovers._PATIENCE_S = 0.5

kept = []

def test_a_thread():
    threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()

def test_a_process():
    kept.append(subprocess.Popen(["sleep", "600"], start_new_session=True))

def test_a_socket():
    kept.append(socket.socket())

def test_a_file():
    Path(tempfile.gettempdir(), "forgotten").touch()

def test_nothing():
    subprocess.Popen(["true"]).wait()

def test_the_processes_end():
    kept[0].kill()
    kept[0].wait()

@pytest.mark.timeout(0.5)
def test_waits():
    threading.Event().wait()

@pytest.mark.timeout(0.5)
async def test_awaits():
    await asyncio.Event().wait()
"""
_IN_C = """
import ctypes
import pytest
from tests import conftest

conftest.GRACE_S = 0.5

@pytest.mark.timeout(0.5)
def test_waits_in_c():
    lock = ctypes.create_string_buffer(256)
    pthread = ctypes.PyDLL(None)  # keeps the GIL
    pthread.pthread_mutex_lock(lock)
    pthread.pthread_mutex_lock(lock)
"""


def run(tmp_path: Path, tests: str, *flags: str) -> str:
    """Runs these tests under the conftest of all tests; returns what pytest wrote."""
    (tmp_path / "test_it.py").write_text(tests)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-q", "--tb=short"]
    command += ["--basetemp", str(tmp_path / "temporary")]
    done = subprocess.run(
        [*command, *flags, "test_it.py"],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": str(_ROOT), "TMPDIR": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=stretched(60),
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only threads and files are seen")
def test_what_a_test_leaves_is_named_and_one_that_waits_for_ever_fails(tmp_path: Path) -> None:
    for program, ending in (("ruff", ""), ("mypy", "echo Not a type; exit 1")):
        (tmp_path / program).write_text(f"#!/bin/sh\n{ending}\n")
        (tmp_path / program).chmod(0o755)
    said = run(tmp_path, _FAULTS, "--lint")
    assert "2 failed, 6 passed, 4 errors" in said, said
    for name, what in (("thread", "thread forgotten"), ("process", "process "), ("socket", "descriptor ")):
        assert f"left behind: {what}" in said.partition(f"teardown of test_a_{name}")[2].partition("____")[2], said
    assert "left behind: file forgotten" in said
    for name in ("test_waits", "test_awaits"):
        assert f"FAILED test_it.py::{name} - Failed: Timeout" in said, said
    order = [said.index(words) for words in ("6 passed", "= mypy failed =", "Not a type", "s of processor time")]
    assert order == sorted(order), said
    assert "ruff" not in said


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are not seen elsewhere")
@pytest.mark.parametrize(("on", "left"), [("cpu", ["descriptor", "file mlx"]), ("gpu", [])])
def test_what_mlx_keeps_on_a_gpu_is_nobodys(
    on: str, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "device", lambda: on)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = holdings()
    event = os.eventfd(0)
    (tmp_path / "mlx").mkdir()
    found = sorted(holdings() - before)
    os.close(event)
    assert [name.partition(" ")[0] if "descriptor" in name else name for name in found] == left


def test_what_waits_in_c_shows_the_main_thread_first_and_ends_its_process(tmp_path: Path) -> None:
    said = run(tmp_path, _IN_C)
    assert said.index("in test_waits_in_c") < said.index("Timeout (0:00:01"), said


@pytest.mark.parametrize(
    ("command", "tests", "run"),
    [
        ("exit 1", pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED),
        ("exit 0", pytest.ExitCode.OK, pytest.ExitCode.OK),
        ("exit 0", pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.TESTS_FAILED),
        ("exec sleep 600", pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERRUPTED),
    ],
)
def test_a_linter_that_fails_fails_the_run_and_an_interrupt_ends_it(
    command: str, tests: pytest.ExitCode, run: pytest.ExitCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linters, "COMMANDS", (("sh", "-c", command), ("true",)))
    session = Mock(exitstatus=tests)
    beside = linters.Linters()
    finishing = beside.pytest_sessionfinish(session, tests)
    next(finishing)
    with suppress(StopIteration):
        next(finishing)
    beside.pytest_unconfigure()
    assert session.exitstatus == run
