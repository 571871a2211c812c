"""Keeps all segments of all models within one bound. Owner: the disk thread.

Before a process writes, it adds the bytes to a count in one small file, the tally. So no process needs a listing of the
directory to keep the bound. A sweep lists the directory and corrects the tally. Until then, bytes that a killed process
has reserved but not written count as used.
"""

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from runner.disk.files import FileEntry, Files
from runner.disk.segment import VERSION, Name, format_of, is_temporary, parse_name
from runner.logs import Log
from runner.sizes import sized

log = Log(__name__)
_ABANDONED_S = 3600.0
"""The age of a temporary file that nobody will finish."""
_FORWARD = 16  # a forward has a fixed cost, as of this many tokens
_SPARE = 16  # a sweep that makes room frees 1 / 16 of the bound in addition
_TOGETHER = 32  # files that are handled between two pauses
_FLOOR_BYTES = 10 << 30  # this much of the volume stays free, or 1 / _FLOOR_SHARE of the volume if that is more
_FLOOR_SHARE = 20
_MOST_SHARE = 4  # but never more than 1 / 4 of the volume is kept free
_TALLY = struct.Struct("<3Q")  # a CRC-32 of these bytes follows in the file


class Tally(NamedTuple):
    """The count of all models' bytes, which all processes share."""

    written: int
    """The bytes that all processes have ever reserved for writing."""
    held: int
    """The bytes that were on disk after the last sweep."""
    at: int
    """The value of `written` when the last sweep began."""

    @property
    def nbytes(self) -> int:
        """The bytes on disk now, or a larger number: bytes written during the last sweep may count twice."""
        return max(0, self.held + self.written - self.at)


class _Held(NamedTuple):
    """A segment in the order of removal: the least tuple is removed first."""

    worth: float
    """Minus idle seconds * bytes / tokens. Low for a segment that is long unused, large, or quickly computed again."""
    rootward: int
    """Minus the tokens up to the segment's end, so that the later of two segments of equal worth is removed first."""
    path: Path
    name: Name
    nbytes: int


class Sweep:
    """Counts the bytes of segments. Removes old segments, segments beyond the bound and abandoned temporary files, and
    nothing else but folders of other format versions."""

    def __init__(self, files: Files, directory: Path, most_bytes: int, most_age_s: float) -> None:
        self.most_bytes = most_bytes
        self.evicted_bytes = 0
        """The bytes that the sweeps of this process have removed."""
        self._files = files
        self._directory = directory
        self._tally: Tally | None = None  # as this process last read or changed it
        self._most_age_s = most_age_s
        self._wanted = 0  # the bytes of the last reservation, if there was no room for them

    @property
    def held_bytes(self) -> int:
        """The bytes of all models, as of the last time that this process read the tally."""
        return self._tally.nbytes if self._tally is not None else 0

    def reserve(self, nbytes: int) -> bool:
        """Counts bytes that are about to be written. Returns False, and counts nothing, if there is no room. The next
        sweep then makes room for them. Raises OSError."""
        self._wanted = nbytes

        def counted(tally: Tally | None) -> Tally | None:
            if tally is None or tally.nbytes + nbytes > self._limit(tally.nbytes):
                return tally
            self._wanted = 0
            return tally._replace(written=tally.written + nbytes)

        self._count(counted)
        return not self._wanted

    def _count(self, change: Callable[[Tally | None], Tally | None]) -> None:
        """Replaces the tally by `change` of it. The tally is None if its file is new or damaged. Raises OSError."""

        def changed(data: bytes) -> bytes:
            self._tally = change(_decoded(data))
            return _encoded(self._tally) if self._tally is not None else b""

        self._files.exchange(self._directory / "tally", changed)

    def run(self, removed: Callable[[Path, Name], None] = lambda _folder, _name: None) -> Iterator[None]:
        """Sweeps, and yields in between, so that the caller can do more urgent work. Calls `removed` with the folder
        and the name of each removed segment."""
        began = 0
        freed = list[int]()
        held = list[_Held]()  # a heap, since sorting 65,000 segments in one call would block all other threads
        total = 0

        def remove(path: Path, name: Name, nbytes: int) -> int:
            if not self._unlink(path):
                return 0
            removed(path.parent, name)
            freed.append(nbytes)
            return nbytes

        def end(tally: Tally | None) -> Tally:
            written = tally.written if tally is not None else 0
            return Tally(written, total, min(began, written))

        try:
            folders = self._files.names(self._directory)
        except OSError:
            return
        with suppress(OSError):
            self._count(lambda tally: tally)
            began = self._tally.written if self._tally is not None else 0
        now_s = self._files.now_s()
        for folder in folders:
            version = format_of(folder)
            path = self._directory / folder
            if version is None or not self._files.is_folder(path):  # a link may lead to files of other programs
                continue
            for count, entry in enumerate(self._entries(path)):
                if count % _TOGETHER == _TOGETHER - 1:
                    yield
                file, nbytes = path / entry.name, entry.nbytes
                name = parse_name(entry.name)
                idle_s = now_s - entry.used_s
                if name is None:
                    if is_temporary(entry.name) and idle_s > _ABANDONED_S:
                        self._unlink(file)
                    total += nbytes
                elif version == VERSION and idle_s <= self._most_age_s:
                    saved = name.stop - name.start + _FORWARD
                    heappush(held, _Held(-max(0.0, idle_s) * nbytes / saved, -name.stop, file, name, nbytes))
                    total += nbytes
                else:
                    remove(file, name, nbytes)
            if version != VERSION:
                self._remove_folder(path)
        limit, room = self._limit(total), self._wanted
        if total + room > limit:
            limit -= limit // _SPARE + (room if room < limit else 0)
            for count in range(len(held)):
                if total <= limit:
                    break
                if count % _TOGETHER == _TOGETHER - 1:
                    yield
                _, _, path, name, nbytes = heappop(held)
                total -= remove(path, name, nbytes)
        if freed:
            log.info(
                "disk cache swept", files=len(freed), freed=sized(sum(freed)), held=sized(total), bound=sized(limit)
            )
        self.evicted_bytes += sum(freed)
        with suppress(OSError):
            self._count(end)

    def _limit(self, total: int) -> int:
        """Returns the bound, or less on a volume that is nearly full. `total` is the bytes of all segments now."""
        try:
            free, size = self._files.space(self._directory)
        except OSError:
            return self.most_bytes
        floor = min(max(_FLOOR_BYTES, size // _FLOOR_SHARE), size // _MOST_SHARE)
        return max(0, min(self.most_bytes, total + free - floor))

    def _entries(self, path: Path) -> Iterator[FileEntry]:
        with suppress(OSError):
            yield from self._files.entries(path)

    def _unlink(self, path: Path) -> bool:
        try:
            self._files.unlink(path)
        except OSError:
            return False
        return True

    def _remove_folder(self, path: Path) -> None:
        with suppress(OSError):
            self._files.unlink(path / "about.json")
            self._files.remove_directory(path)


def _encoded(tally: Tally) -> bytes:
    numbers = _TALLY.pack(*tally)  # 24 bytes
    return numbers + crc32(numbers).to_bytes(4, "little")


def _decoded(data: bytes) -> Tally | None:
    """Returns the tally from the bytes of the tally's file, or None if the file is new or damaged."""
    sound = len(data) >= 28 and crc32(data[:24]) == int.from_bytes(data[24:28], "little")
    return Tally(*_TALLY.unpack(data[:24])) if sound else None
