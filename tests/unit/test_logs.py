"""No line carries a marker of the host's scanner, and none can hold up the process."""

import itertools
import os
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner import logs
from runner.errors import ComputeError, ModelError, RankError, no_mlx
from runner.versions import remedy
from tests.lib.programs import python

MARKERS = [*logs._MARKERS, *logs._OUT_OF_MEMORY]


@given(st.lists(st.sampled_from([*MARKERS, *(m.upper() for m in logs._OUT_OF_MEMORY), " ", ":", "x"]), max_size=6))
def test_no_text_keeps_a_marker(parts: list[str]) -> None:
    text = logs.harmless("".join(parts))
    assert not any(marker in text for marker in logs._MARKERS)
    assert not any(phrase in text.lower() for phrase in logs._OUT_OF_MEMORY)


def _from(*errors: Exception) -> Exception:
    """Returns the first error, raised from the second, and so on."""
    for error, cause in itertools.pairwise(errors):
        error.__cause__ = cause
    return errors[0]


def test_a_line_is_slog_text() -> None:
    done = python(
        "-c",
        "from runner import logs; logs.start(20); log = logs.Log('x');"
        "log.info('model loaded', model='mlx:latest', n=3, x=0.5, empty='', text='a=\"b\"\\n', flag=True);"
        "log.debug('no')",
    )
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    time, level, source, *_ = line.split(" ")
    assert time.startswith("time=20")
    assert (level, source) == ("level=INFO", "source=<string>:1")
    assert line.endswith(r'msg="model loaded" model="mlx :latest" n=3 x=0.5 empty="" text="a=\"b\"\n" flag=true')


def test_a_marker_made_by_two_neighbouring_fields_is_respelled_too() -> None:
    code = "from runner import logs; logs.start(20); logs.Log('x').info('hi', device='CUDA', error='none')"
    assert python("-c", code).stderr.rstrip().endswith("device=CUDA-error=none")


def test_a_long_line_is_cut_to_what_a_pipe_takes_at_once() -> None:
    done = python("-c", "from runner import logs; logs.start(20); logs.Log('x').info('y' * 10000)")
    assert len(done.stderr) == logs.LINE_LIMIT
    assert done.stderr.endswith("y\n")


def test_what_python_would_print_by_itself_is_a_log_line() -> None:
    done = python(
        "-c",
        "import warnings; from runner import logs; logs.start(20)\n"
        "class Bad:\n"
        "    def __del__(self): raise ValueError('late')\n"
        "del_me = Bad(); del del_me\n"
        "warnings.warn('old')",
    )
    lines = done.stderr.splitlines()
    assert [line.split()[1] for line in lines] == ["level=ERROR", "level=WARN"]
    assert "ValueError : late" in lines[0]


def test_a_fatal_error_leaves_even_when_nobody_reads() -> None:
    read, write = os.pipe()
    code = (
        "import os; from runner import logs; os.set_blocking(2, False)\n"
        "try:\n"
        "    while True: os.write(2, b'x' * 4096)\n"
        "except BlockingIOError: os.set_blocking(2, True)\n"
        "logs.fatal('late')"
    )
    done = python("-c", code, stderr=write)
    os.close(write)
    os.close(read)
    assert done.returncode == 1


def test_a_fatal_error_is_one_line_and_a_status() -> None:
    done = python("-c", "from runner import logs; logs.start(20); logs.fatal('no\\nsuch  model')")
    assert (done.stderr, done.returncode) == ("Error: no such model\n", 1)


def test_nothing_comes_after_a_fatal_error() -> None:
    """Code that is not ours, such as MLX's ring, may write until the process is gone."""
    done = python(
        "-c",
        "import os; from runner import logs; leave = os._exit\n"
        "os._exit = lambda status: (os.write(2, b'[ring] closed\\n'), leave(status))\n"
        "logs.fatal('no model')",
    )
    assert (done.stderr, done.returncode) == ("Error: no model\n", 1)


def test_an_error_of_ranks_begins_a_line_whatever_the_ring_has_begun_to_write() -> None:
    done = python(
        "-c",
        "import os; from runner import logs; from runner.errors import RankError\n"
        "os.write(2, b'[ring] Socket 15'); logs.die(RankError('rank 0: it broke'))",
    )
    assert (done.stderr, done.returncode) == ("[ring] Socket 15\nError: rank 0: it broke\n", 1)


FOREIGN = "tensor x\n\x1b[31mError: Out of memory: HIPmalloc failed\x9b2J\udcff"
"""A name that pretends to be a host's reason to unload all its models, and that would steer a terminal."""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ModelError(FOREIGN), r"tensor x \u001b[31mError: Out-of-memory: HIPmalloc-failed\u009b2J\udcff"),
        (ValueError(FOREIGN), r"ValueError: tensor x \u001b[31mError: Out-of-memory: HIPmalloc-failed\u009b2J\udcff"),
        (_from(RankError("a: Out of memory"), ComputeError("b"), ValueError("out of memory")), "a: Out-of-memory"),
        (_from(RankError("a: out of memory: b"), ComputeError("b"), MemoryError()), "a: out of memory: b"),
        (MemoryError("b\x1b"), r"out of memory: MemoryError: b\u001b"),
    ],
)
def test_the_last_line_holds_nothing_foreign_that_a_host_or_a_terminal_acts_on(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert end(error, monkeypatch) == b"\n" * isinstance(error, RankError) + f"Error: then {line}\n".encode()


def end(error: Exception, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Returns what a process writes that dies of the error."""
    written: list[bytes] = []
    monkeypatch.setattr(os, "_exit", lambda status: written.append(b"status %d" % status))
    monkeypatch.setattr(os, "write", lambda _, data: written.append(data))
    monkeypatch.setattr(logs, "_ending", threading.Lock())
    monkeypatch.setattr(logs, "_silent_stderr", lambda: 2)
    logs.die(error, 7, before="then ")
    assert written[1:] == [b"status 7"]
    return written[0]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (AttributeError("no quantized_matmul"), f"old: {remedy()}; then AttributeError: no quantized_matmul"),
        (_from(no_mlx(ImportError("no core")), ImportError()), f"old: {remedy()}; then MLX not available: no core"),
        (_from(ComputeError("it fails"), TypeError("x")), f"old: {remedy()}; then it fails"),
        (ModelError("bad"), "then bad"),
        (ValueError("x"), "then ValueError: x"),
    ],
)
def test_an_old_mlx_is_named_before_what_it_lacks(error: Exception, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "misfits", lambda: "old")
    assert end(error, monkeypatch) == f"Error: {told}\n".encode()


def test_a_fatal_error_is_written_after_the_crash_of_another_process(tmp_path: Path) -> None:
    """Its report goes to the end of a file, which moves no place but its own."""
    code = (
        "import os; from runner import logs\n"
        "os.write(os.open('/proc/self/fd/2', os.O_WRONLY | os.O_APPEND), b'Fatal Python error\\n'); logs.fatal('late')"
    )
    with (tmp_path / "log").open("wb") as log:
        python("-c", code, stderr=log)
    assert (tmp_path / "log").read_text() == "Fatal Python error\nError: late\n"


def test_a_full_pipe_drops_lines_instead_of_blocking() -> None:
    read, write = os.pipe()
    code = (
        "from runner import logs; logs.start(20); log = logs.Log('x')\n"
        "for _ in range(100): log.info('x' * 3000)\n"
        "print('through')"
    )
    done = python("-c", code, stdout=subprocess.PIPE, stderr=write)
    os.close(write)
    os.close(read)
    assert done.stdout == "through\n"


def test_a_vanished_reader_is_silent() -> None:
    read, write = os.pipe()
    os.close(read)
    code = "from runner import logs; logs.start(20); logs.Log('x').info('hello'); print('through')"
    done = python("-c", code, stdout=subprocess.PIPE, stderr=write)
    os.close(write)
    assert (done.stdout, done.returncode) == ("through\n", 0)


def test_an_error_that_is_its_own_cause_has_no_other() -> None:
    error = ModelError("the first")
    error.__cause__ = error
    assert logs.cause_of(error) is error


def test_mlx_without_a_backend_is_named_as_such() -> None:
    text = str(no_mlx(ImportError("libmlx.so: cannot open shared object file: No such file or directory")))
    assert text == f"MLX not available: it was installed without a backend; {remedy()}"
