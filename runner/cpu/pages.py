"""Moves weights to huge pages of Linux, which few systems give to a program that does not ask for them.

A token reads all weights once. With pages of 4 kB, a core then waits more for the places of pages than for weights.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

HUGE = 1 << 21
"""The bytes of a huge page."""
_APART = mmap.PAGESIZE + 64
"""The most bytes between arrays that follow one another: a part of a page, and the header of a piece of memory."""
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_COLLAPSE = 25
"""`MADV_COLLAPSE`: to make a huge page at once, since Linux 6.1. Older versions make some in the background."""


def use_huge_pages(arrays: Iterable[Any]) -> Thread | None:
    """Moves arrays that lie together, each in one piece, to huge pages. Returns the thread that does it; None if there
    is nothing to move. The arrays may be used, and freed, meanwhile."""
    if sys.platform != "linux" or _forbidden():
        return None
    spans: list[tuple[int, int]] = []
    views = [memoryview(each) for each in arrays]
    for start, end in sorted(_span(view) for view in views if view.c_contiguous):
        if spans and start - spans[-1][1] <= _APART:
            start, end = spans[-1][0], max(spans.pop()[1], end)
        spans.append((start, end))
    pages = [at for start, end in spans for at in range(-(-start // HUGE) * HUGE, end // HUGE * HUGE, HUGE)]
    if not pages:
        return None
    thread = Thread(target=_move, args=(pages,), name="huge pages", daemon=True)
    thread.start()
    return thread


def _forbidden() -> bool:
    """True if the system is set to have no huge pages: `MADV_COLLAPSE` alone would make them all the same."""
    try:
        return "[never]" in _SETTING.read_text()
    except OSError:
        return True


def _span(view: memoryview) -> tuple[int, int]:
    start = ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0
    return start, start + view.nbytes


def _move(pages: Sequence[int]) -> None:
    """Moves the memory at these addresses, until Linux has no huge page left, or gives none."""
    madvise, size = ctypes.CDLL(None).madvise, ctypes.c_size_t(HUGE)
    for advice in (mmap.MADV_HUGEPAGE, _COLLAPSE):
        if any(madvise(ctypes.c_void_p(page), size, advice) for page in pages):
            return
