"""The text of an exception of any kind, for the host and in the log."""

import subprocess
import sys

import pytest

from runner import logs
from runner.errors import ModelError
from scripts.tools.host.lib import OUT_OF_MEMORY, RULES, OutputScanner, capture

METAL = (
    "[malloc] Unable to allocate 1073741824 bytes.",
    "[METAL] Command buffer execution failed: Insufficient Memory (8:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
    "cudaMallocAsync(&data, size, stream) failed: out of memory",
)
"""MLX's messages when memory runs out, on Metal and on CUDA."""
OTHER_LIMITS = (
    "[metal::malloc] Attempting to allocate 103 bytes which is greater than the maximum allowed buffer size of 17.",
    "[metal::malloc] Resource limit (499000) exceeded.",
)
"""Limits that unloading other models would not lift."""


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError("not even this")


@pytest.mark.parametrize("error", [MemoryError(), MemoryError("a thing"), *map(RuntimeError, METAL)], ids=str)
def test_running_out_of_memory_is_named_by_a_phrase_that_every_host_knows(error: Exception) -> None:
    assert logs.exception_line(error).startswith(f"out of memory: {type(error).__name__}")
    assert logs.exception_line(error).endswith(str(error))


def test_no_other_fault_contains_such_a_phrase() -> None:
    phrase = " and ".join(OUT_OF_MEMORY)
    for error in (ValueError(f"said: {phrase.upper()}"), ModelError(phrase), KeyError(phrase), OSError(phrase)):
        text = logs.exception_line(error)
        assert not any(known in text.lower() for known in OUT_OF_MEMORY)
        assert text.startswith(f"{type(error).__name__}: ")


def test_other_texts_are_unchanged() -> None:
    for text in OTHER_LIMITS:
        assert logs.exception_line(RuntimeError(text)) == f"RuntimeError: {text}"
    assert logs.exception_line(RuntimeError("Error: mlx: it broke")) == "RuntimeError: Error: mlx: it broke"
    assert logs.exception_line(ValueError()) == "ValueError"


def test_an_exception_whose_text_cannot_be_shown_is_still_named() -> None:
    assert logs.exception_line(UnspeakableError()) == "UnspeakableError: (its text cannot be shown)"


def test_a_crash_is_a_line_that_hosts_capture() -> None:
    code = "from runner import logs; logs.start(10); import ctypes; ctypes.string_at(0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    first = done.stderr.decode().splitlines()[0]
    assert capture(first) == "error: Segmentation fault"
    assert done.returncode < 0


def test_an_abort_adds_no_line_after_the_reason() -> None:
    """MLX on Metal prints the reason and aborts; early hosts keep only the last line."""
    code = (
        "from runner import logs; logs.start(10); import os\n"
        "os.write(2, b'libc++abi: mlx: Insufficient Memory\\n'); os.abort()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    for rule in RULES:
        scanner = OutputScanner(rule)
        scanner.feed(done.stderr)
        scanner.end()
        assert "Insufficient Memory" in scanner.captured, rule.name
