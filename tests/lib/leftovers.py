"""What a test leaves behind: threads, child processes, open descriptors, and files.

A thread that nobody ends, a socket that only the garbage collector closes, or a process that outlives its test changes
what later tests meet: their memory, their descriptors, their stacks when one of them hangs.
"""

import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_LINUX = sys.platform == "linux"
_ROOT = Path(__file__).parents[2]
_PATIENCE_S = 10.0
"""For what is just ending: a thread that was told to, a child that was killed."""
_ALLOWED = ("/dev/", "/proc/")
"""Descriptors of the process: null and random devices, which libraries open once, and those of listings here."""


@dataclass(frozen=True)
class Holdings:
    """What this process has at one moment."""

    threads: frozenset[threading.Thread]
    children: frozenset[str]
    descriptors: frozenset[tuple[str, str]]
    """The number and the target of each."""
    files: frozenset[str]

    @classmethod
    def now(cls) -> Self:
        """Takes stock, in a tenth of a millisecond while there are no children."""
        return cls(
            # MLX's own threads, which read files, are dummies: they stay until the process ends.
            frozenset(each for each in threading.enumerate() if not isinstance(each, threading._DummyThread)),
            _children(),
            _descriptors(),
            frozenset(each for place in (tempfile.gettempdir(), _ROOT) for each in _names(place)),
        )

    def left_since(self, before: Self) -> list[str]:
        """Returns what is here and was not before, as words for a message."""
        return [
            *(f"thread {thread.name}" for thread in self.threads - before.threads),
            *(f"process {child}" for child in self.children - before.children),
            *(f"descriptor {number}: {target}" for number, target in self.descriptors - before.descriptors),
            *(f"file {name}" for name in self.files - before.files),
        ]


def leftovers(before: Holdings) -> list[str]:
    """Returns what was not there before and does not go within a while."""
    until = time.monotonic() + _PATIENCE_S
    while (left := Holdings.now().left_since(before)) and time.monotonic() < until:
        time.sleep(0.01)
    return left


def _names(place: str | Path) -> list[str]:
    """Returns what lies in a directory, but for what the tools of tests keep there: `.pytest_cache`, `.hypothesis`."""
    return [name for name in os.listdir(place) if not name.startswith(".")]  # noqa: PTH208  # no paths: it is fast


def _children() -> frozenset[str]:
    """Returns the children, ended ones that nobody has waited for included, with their names."""
    if not _LINUX:
        return frozenset()
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return frozenset()
    return frozenset(pid for task in Path("/proc/self/task").iterdir() for pid in _read(task / "children").split())


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # that thread has ended
        return ""


def _descriptors() -> frozenset[tuple[str, str]]:
    if not _LINUX:
        return frozenset()
    return frozenset((number, target) for number in _names("/proc/self/fd") if (target := _target(number)))


def _target(number: str) -> str:
    try:
        target = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115  # as above
    except OSError:  # that of the listing
        return ""
    return "" if target.startswith(_ALLOWED) else target
