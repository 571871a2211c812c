"""The leftovers of a test: threads, child processes, open descriptors, and files.

A thread that nobody ends, a socket that only the garbage collector closes, or a process that outlives its test changes
what later tests meet: their memory, their descriptors, their stacks when one of them hangs.
"""

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

_LINUX = sys.platform == "linux"
_ROOT = Path(__file__).parents[2]
_PATIENCE_S = 10.0
"""The time in which threads and children that are just ending may end."""


_OPEN = "/dev/", "/proc/"
"""The beginnings of the targets of descriptors that stay open: null and random devices, and those of listings here."""
_OPEN_ON_GPU = *_OPEN, "anon_inode:[eventfd]"  # CUDA's events
_MADE_ON_GPU = "mlx"  # the folder of MLX's compiled kernels


def holdings() -> frozenset[str]:
    """Takes stock, in words for a message: threads, child processes, descriptors and files. It takes a tenth of a
    millisecond while there are no children."""
    # MLX's own threads, which read files, are dummies: they stay until the process ends.
    threads = [each for each in threading.enumerate() if not isinstance(each, threading._DummyThread)]
    return frozenset(
        (
            *(f"thread {thread.name} ({id(thread):x})" for thread in threads),
            *(f"process {child}" for child in _children()),
            *(f"descriptor {number}: {target}" for number, target in _descriptors()),
            *(f"file {name}" for place in (tempfile.gettempdir(), _ROOT) for name in _names(place)),
        )
    )


def leftovers(before: frozenset[str]) -> frozenset[str]:
    """Returns the holdings that were not there before and do not go within a while."""
    until = time.monotonic() + _PATIENCE_S
    while (left := holdings() - before) and time.monotonic() < until:
        time.sleep(0.01)
    return left


def _names(place: str | Path) -> list[str]:
    """Returns the names in a directory, without hidden ones: tools of tests keep `.pytest_cache` and `.hypothesis`."""
    names = [name for name in os.listdir(place) if not name.startswith(".")]  # noqa: PTH208  # no paths: it is fast
    return [name for name in names if name != _MADE_ON_GPU or not _on_gpu()]


def _children() -> list[str]:
    """Returns the children, ended ones that nobody has waited for included, with their names."""
    if not _LINUX:
        return []
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return []
    return [pid for task in Path("/proc/self/task").iterdir() for pid in _read(task / "children").split()]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # that thread has ended
        return ""


def _descriptors() -> list[tuple[str, str]]:
    names = _names("/proc/self/fd") if _LINUX else []
    return [(number, target) for number in names if (target := _target(number))]


def _target(number: str) -> str:
    try:
        target = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115  # as above
    except OSError:  # that of the listing
        return ""
    return "" if target.startswith(_OPEN_ON_GPU if _on_gpu() else _OPEN) else target


def _on_gpu() -> bool:
    from runner.device import device  # imports MLX, which comes after the BLAS

    return device() == "gpu"
