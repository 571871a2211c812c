"""Keeps all segments of all models within one bound. Owner: the disk thread."""

import heapq
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from runner.cache.disk.files import Entry, Files
from runner.cache.disk.name import Name, format_of, is_temporary, parse_name
from runner.cache.disk.segment import VERSION
from runner.logs import Log
from runner.sizes import shown

log = Log(__name__)
_ABANDONED_S = 3600.0
"""The age of a temporary file that nobody will finish."""
_FORWARD = 16  # tokens: the fixed cost of a forward
_SPARE = 16  # of the bound: what is freed at once
_TOGETHER = 32  # files between two looks for something more urgent
_SORTED_TOGETHER = 1024  # one sort of 65,000 would hold up all threads for as long as it takes
_FLOOR_BYTES, _FLOOR_SHARE, _MOST_SHARE = 10 << 30, 20, 4


class Swept(NamedTuple):
    """What a sweep found and did."""

    files: int
    nbytes: int
    """What is left of all models."""
    removed: int
    freed_bytes: int


class _Held(NamedTuple):
    path: Path
    name: Name
    nbytes: int
    used_s: float


class Sweep:
    """Counts, and removes what is too old or too much. Other files than segments are never touched."""

    def __init__(self, files: Files, directory: Path, most_bytes: int, most_age_s: float) -> None:
        self._files, self._directory = files, directory
        self.most_bytes = most_bytes
        self._most_age_s = most_age_s
        self.last = Swept(0, 0, 0, 0)
        """The result of the last sweep."""
        self.evicted_bytes = 0
        """By all sweeps."""

    def run(self, removed: Callable[[Path, Name], None] = lambda _path, _name: None) -> Iterator[None]:
        """Sweeps, with pauses in which something more urgent may be done. `removed` learns of each segment."""
        held, others = list[_Held](), 0
        try:
            folders = self._files.names(self._directory)
        except OSError:
            self.last = Swept(0, 0, 0, 0)
            return
        now_s = self._files.now_s()
        gone, freed = 0, 0
        for folder in folders:
            version = format_of(folder)
            path = self._directory / folder
            if version is None or not self._files.is_folder(path):  # what a link leads to is not ours
                continue
            for count, entry in enumerate(self._entries(path)):
                if count % _TOGETHER == _TOGETHER - 1:
                    yield
                name = parse_name(entry.name)
                idle_s = now_s - entry.used_s
                if name is None:
                    if is_temporary(entry.name) and idle_s > _ABANDONED_S:
                        self._unlink(path / entry.name)
                    others += entry.nbytes
                elif version != VERSION or idle_s > self._most_age_s:
                    if self._unlink(path / entry.name):
                        removed(path, name)
                        gone, freed = gone + 1, freed + entry.nbytes
                else:
                    held.append(_Held(path / entry.name, name, entry.nbytes, entry.used_s))
            if version != VERSION:
                self._remove_folder(path)
        total, aged = others + sum(each.nbytes for each in held), gone
        limit = self._limit(total)
        if total > limit:
            limit -= limit // _SPARE
            order = partial(_worthless, now_s=now_s)
            runs = list[list[_Held]]()
            for at in range(0, len(held), _SORTED_TOGETHER):
                runs.append(sorted(held[at : at + _SORTED_TOGETHER], key=order, reverse=True))
                yield
            for count, victim in enumerate(heapq.merge(*runs, key=order, reverse=True)):
                if total <= limit:
                    break
                if count % _TOGETHER == _TOGETHER - 1:
                    yield
                if self._unlink(victim.path):
                    removed(victim.path.parent, victim.name)
                    gone, freed = gone + 1, freed + victim.nbytes
                    total -= victim.nbytes
        if gone:
            log.info("disk cache swept", files=gone, freed=shown(freed), held=shown(total), bound=shown(limit))
        self.evicted_bytes += freed
        self.last = Swept(len(held) - (gone - aged), total, gone, freed)

    def _limit(self, total: int) -> int:
        """Returns the bytes that may be held: the bound, or less if the volume is nearly full."""
        try:
            free, size = self._files.space(self._directory)
        except OSError:
            return self.most_bytes
        floor = min(max(_FLOOR_BYTES, size // _FLOOR_SHARE), size // _MOST_SHARE)
        return max(0, min(self.most_bytes, total + free - floor))

    def _entries(self, path: Path) -> Iterator[Entry]:
        try:
            yield from self._files.entries(path)
        except OSError:
            return

    def _unlink(self, path: Path) -> bool:
        try:
            self._files.unlink(path)
        except OSError:
            return False
        return True

    def _remove_folder(self, path: Path) -> None:
        try:
            self._files.unlink(path / "about.json")
            self._files.remove_directory(path)
        except OSError:
            return


def _worthless(held: _Held, now_s: float) -> tuple[float, int]:
    """Returns how worthless a segment is: idle for long, large, and soon computed again; of equals the deepest."""
    saved = held.name.stop - held.name.start + _FORWARD
    return max(0.0, now_s - held.used_s) * held.nbytes / saved, held.name.stop
