"""Keeps all segments of all models within one bound. Owner: the disk thread.

Every process reserves what it is about to write in one small file, the tally. So the bound holds without a look at the
directory; a sweep, which looks, corrects it. What a killed process had reserved counts until then.
"""

import heapq
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from runner.disk.files import Entry, Files
from runner.disk.segment import VERSION, Name, format_of, is_temporary, parse_name
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
_TALLY = struct.Struct("<3Q")  # and the CRC-32 of it


class Tally(NamedTuple):
    """The bytes of all models, as all processes count them."""

    written: int
    """By all processes, ever."""
    held: int
    """What the last sweep left."""
    at: int
    """`written` when it began."""

    @property
    def nbytes(self) -> int:
        """What is held now, or more: what was written during the sweep may count twice."""
        return max(0, self.held + self.written - self.at)


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
        self.held_bytes = 0
        """Of all models, when this process last looked at the tally."""
        self._tally = directory / "tally"
        self._wanted = 0  # bytes for which there was no room

    def reserve(self, nbytes: int) -> bool:
        """Counts bytes that are about to be written. Returns False if there is no room for them, which the next sweep
        makes. Raises OSError."""
        self._wanted = nbytes

        def counted(tally: Tally | None) -> Tally | None:
            if tally is None or tally.nbytes + nbytes > self._limit(tally.nbytes):
                return tally
            self._wanted = 0
            return tally._replace(written=tally.written + nbytes)

        self._count(counted)
        return not self._wanted

    def _count(self, change: Callable[[Tally | None], Tally | None]) -> None:
        """Changes the tally, which is None if nobody has counted yet. Raises OSError."""

        def changed(data: bytes) -> bytes:
            tally = change(_parsed(data))
            self.held_bytes = tally.nbytes if tally is not None else 0
            return _spelled(tally) if tally is not None else b""

        self._files.exchange(self._tally, changed)

    def run(self, removed: Callable[[Path, Name], None] = lambda _path, _name: None) -> Iterator[None]:
        """Sweeps, with pauses in which something more urgent may be done. `removed` learns of each segment."""
        held, others, began = list[_Held](), 0, 0

        def begin(tally: Tally | None) -> Tally | None:
            nonlocal began
            began = tally.written if tally is not None else 0
            return tally

        def end(tally: Tally | None) -> Tally:
            written = tally.written if tally is not None else 0
            return Tally(written, total, min(began, written))

        try:
            folders = self._files.names(self._directory)
        except OSError:
            self.last = Swept(0, 0, 0, 0)
            return
        with suppress(OSError):
            self._count(begin)
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
        limit, room = self._limit(total), self._wanted
        if total + room > limit:
            limit -= limit // _SPARE + (room if room < limit else 0)
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
        with suppress(OSError):
            self._count(end)
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


def _spelled(tally: Tally) -> bytes:
    numbers = _TALLY.pack(*tally)  # 24 bytes
    return numbers + crc32(numbers).to_bytes(4, "little")


def _parsed(data: bytes) -> Tally | None:
    """Returns the tally in the bytes of its file; None if that is new or damaged."""
    sound = len(data) >= 28 and crc32(data[:24]) == int.from_bytes(data[24:28], "little")
    return Tally(*_TALLY.unpack(data[:24])) if sound else None


def _worthless(held: _Held, now_s: float) -> tuple[float, int]:
    """Returns how worthless a segment is: idle for long, large, and soon computed again; of equals the deepest."""
    saved = held.name.stop - held.name.start + _FORWARD
    return max(0.0, now_s - held.used_s) * held.nbytes / saved, held.name.stop
