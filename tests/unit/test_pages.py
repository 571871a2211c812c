"""Huge pages for weights."""

import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from runner.cpu import pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked")
_SIZE = 8 * pages.HUGE


def huge_bytes(array: bytearray) -> int:
    """Returns the bytes in huge pages of the mappings that hold an array."""
    start, end = pages._span(memoryview(array))
    mappings = re.findall(r"(?m)^(\w+)-(\w+) (?:.*\n)+?AnonHugePages: +(\d+) kB", Path("/proc/self/smaps").read_text())
    return sum(1024 * int(kb) for first, last, kb in mappings if int(first, 16) < end and start < int(last, 16))


@pytest.mark.skipif(pages._forbidden(), reason="this Linux gives no huge pages")
def test_an_array_is_moved_and_keeps_its_contents() -> None:
    array = bytearray(range(256)) * (_SIZE // 256)
    thread = pages.use_huge_pages([array])
    assert thread is not None
    thread.join()
    assert huge_bytes(array) >= _SIZE - pages.HUGE
    assert array == bytearray(range(256)) * (_SIZE // 256)


@pytest.mark.parametrize("setting", ["always madvise [never]\n", None])
def test_nothing_is_moved_where_the_system_has_no_huge_pages(
    setting: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "enabled"
    if setting is not None:
        path.write_text(setting)
    monkeypatch.setattr(pages, "_SETTING", path)
    assert pages.use_huge_pages([bytearray(_SIZE)]) is None


def test_arrays_that_follow_one_another_share_huge_pages_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    monkeypatch.setattr(pages, "_forbidden", lambda: False)
    monkeypatch.setattr(pages, "_move", moved.extend)
    array = memoryview(bytearray(_SIZE))
    parts = [array[at : at + pages.HUGE // 4] for at in range(0, _SIZE, pages.HUGE // 4)]
    assert pages.use_huge_pages([parts[0], parts[5], b"", array[::2]]) is None
    for arrays in (reversed(parts), [array[: 2 * pages.HUGE], array[3 * pages.HUGE :]]):
        thread = pages.use_huge_pages(arrays)
        assert thread is not None
        thread.join()
    together, apart = moved[: moved.index(max(moved)) + 1], moved[moved.index(max(moved)) + 1 :]
    assert all(after - before == pages.HUGE for before, after in pairwise(together))
    assert _SIZE // pages.HUGE - 1 <= len(together) <= _SIZE // pages.HUGE
    assert 0 < len(apart) < len(together)
