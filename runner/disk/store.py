"""The directory of one model's segments: list, read, publish. Owner: the disk thread. Any thread may read the index and
the counts.

A file is written under a temporary name, and renamed when it is complete. So however the process ends, no incomplete
segment remains. There is no fsync: SIGKILL loses no written data, and after a power cut the sums show the damage.
"""

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from mmap import mmap
from pathlib import Path

from runner.disk.files import Files
from runner.disk.segment import (
    ENTRIES,
    MOST_BYTES,
    SEAL_BYTES,
    Layers,
    Name,
    Segment,
    SegmentError,
    SegmentFacts,
    checked,
    compare,
    header_bytes,
    parse_name,
    read_facts,
    sealed,
    temporary,
)
from runner.logs import Log

log = Log(__name__)
_FOR_GOOD = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EEXIST, errno.ENOTDIR)
_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 3600.0
_RELIST_S = 2.0
_DAY_S = 86_400.0
_TOGETHER = 256  # new names that are added between two pauses for other threads


class Index:
    """The segments that this process knows in the directory. Each single change of a dictionary is atomic, so other
    threads may read while the disk thread changes the index."""

    def __init__(self, names: Iterable[Name] = ()) -> None:
        self.names: dict[str, Name] = {}
        """File name -> name, for all segments."""
        self.starts: Counter[int] = Counter()
        """Offset -> number of segments of entries that start there."""
        self.ends: Counter[int] = Counter()
        """Offset -> number of tails and states that end there."""
        self.kinds: Counter[str] = Counter()
        """Kind -> number of segments."""
        self._after: dict[str, tuple[Name, ...]] = {}
        self._held: dict[tuple[str, str], Name] = {}
        for name in names:
            self.add(name)

    def __contains__(self, name: Name) -> bool:
        return name.file in self.names

    def after(self, point: str) -> tuple[Name, ...]:
        """Returns the segments of entries that start at this point."""
        return self._after.get(point, ())

    def held(self, kind: str, point: str) -> Name | None:
        """Returns the tail or the state (by `kind`) that ends at this point, or None."""
        return self._held.get((kind, point))

    def add(self, name: Name) -> None:
        if name.file in self.names:
            return
        if name.kind == ENTRIES:
            self._after[name.first] = (*self.after(name.first), name)
            self.starts[name.start] += 1
        else:
            self._held[name.kind, name.last] = name
            self.ends[name.stop] += 1
        self.kinds[name.kind] += 1
        self.names[name.file] = name

    def discard(self, name: Name) -> None:
        if self.names.pop(name.file, None) is None:
            return
        self.kinds[name.kind] -= 1
        if name.kind == ENTRIES:
            self.starts[name.start] -= 1
            left = tuple(other for other in self.after(name.first) if other != name)
            if left:
                self._after[name.first] = left
            else:
                self._after.pop(name.first, None)
        else:
            self.ends[name.stop] -= 1
            if self._held.get((name.kind, name.last)) == name:
                del self._held[name.kind, name.last]

    def replace(self, files: Iterable[str], rest: Callable[[], None] = lambda: None) -> None:
        """Makes the index hold exactly the segments among these files. Calls `rest` after every 256 new names."""
        wanted = set(files)
        for file in self.names.keys() - wanted:
            self.discard(self.names[file])
        for count, file in enumerate(wanted - self.names.keys()):
            name = parse_name(file)
            if name is not None:
                self.add(name)
            if count % _TOGETHER == _TOGETHER - 1:
                rest()


class SegmentStore:
    """The segments of one namespace. No method raises OSError: an unreadable file is skipped, a failed write logged."""

    def __init__(self, files: Files, directory: Path, namespace: str, about: bytes, most_written: int) -> None:
        """`directory` is the directory of all models. `namespace` is the name of this model's folder there. `about` is
        the content of the folder's about.json. Writes at most `most_written` bytes a day."""
        self.namespace = namespace
        self.folder = directory / namespace
        self._files = files
        self._about = about
        self._most_written = most_written
        # The listing.
        self.index = Index()
        self.listed = False
        """True once the folder has been listed for the first time."""
        self._changed_ns = -1
        self._listed_s = float("-inf")
        # Reading.
        self.read_bytes = 0
        self.rejected: Counter[str] = Counter()
        """Reason -> number of refused files."""
        self.buffers: list[memoryview] = []
        """Buffers for the next reads. A buffer that is too small for a read is dropped."""
        # Writing.
        self.written_bytes = 0
        self.write_errors = 0
        self.why_not_writing = ""
        """The reason why writing has ended for good. Empty otherwise, even while writing pauses."""
        self._number = int.from_bytes(os.urandom(6))  # random, since runners in containers may share a process id
        self._pause_s = _PAUSE_S
        self._paused_until_s = float("-inf")
        self._day_s = float("-inf")
        self._written_today = 0

    def open(self) -> None:
        """Makes the folder, unless it exists, and lists its files."""
        try:
            self._make_folder()
        except OSError as error:
            self._failed(error)
        self.relist()
        self.listed = True

    def relist(self) -> None:
        """Lists the folder's files again if the folder has changed. Looks at most every two seconds."""
        now_s = self._files.now_s()
        if 0 <= now_s - self._listed_s < _RELIST_S:
            return
        self._listed_s = now_s
        try:
            changed_ns = self._files.changed_ns(self.folder)
            if changed_ns != self._changed_ns:
                self.index.replace(self._files.plain(self.folder), self._files.rest)
                self._changed_ns = changed_ns
        except OSError:
            self.index.replace(())
            self._changed_ns = -1

    def read_segment(self, name: Name, layers: Layers | None = None, *, only_tokens: bool = False) -> Segment | None:
        """Reads a segment, and compares it with its sums and, if given, with the model's layers. Returns None if the
        file is gone. If the file is damaged or has other layers, removes it and returns None.

        With `only_tokens`, reads only the header and the tokens, and does not compare the tokens with the sum.
        """
        try:
            file = self._files.open(self.folder / name.file)
            try:
                facts, at = self._facts(file, name)
                if layers is not None:
                    compare(facts, layers)  # before memory is allocated for the sizes that the header states
                sizes = facts.sizes
                buffer = memoryview(bytearray(sizes[0])) if only_tokens else self._buffer(sum(sizes))
                self._fill(file, buffer, at)
            finally:
                self._files.close(file)
            self.read_bytes += len(buffer)
            return Segment(facts, buffer) if only_tokens else checked(facts, buffer)
        except SegmentError as error:
            self.reject(name, error.reason)
        except (OSError, MemoryError):
            self.index.discard(name)
        return None

    def reject(self, name: Name, reason: str) -> None:
        """Removes a segment that failed a check, and counts it under `reason`."""
        if not self.rejected[reason]:
            log.warning("a file of the disk cache is damaged: removed", reason=reason, file=name.file)
        self.rejected[reason] += 1
        self.index.discard(name)  # a file that cannot be removed is not used either
        with suppress(OSError):
            self._files.unlink(self.folder / name.file)

    def touch(self, name: Name) -> None:
        try:
            self._files.touch(self.folder / name.file)
        except FileNotFoundError:
            self.index.discard(name)
        except OSError:
            return  # the volume may be read-only: its segments can still be read

    def _facts(self, file: int, name: Name) -> tuple[SegmentFacts, int]:
        """Returns the facts in an open file, and the offset of the file's data. Raises SegmentError and OSError."""
        size = self._files.size(file)
        if size is None or size > MOST_BYTES:
            raise SegmentError("torn")
        count = header_bytes(self._part(file, 0, 8), size)
        header, seal = self._part(file, 8, count), self._part(file, size - SEAL_BYTES, SEAL_BYTES)
        return read_facts(header, seal, name, self.namespace, size), 8 + count

    def _part(self, file: int, at: int, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        self._fill(file, memoryview(buffer), at)
        return bytes(buffer)

    def _buffer(self, nbytes: int) -> memoryview:
        buffer = self.buffers.pop() if self.buffers else None
        if buffer is None or len(buffer) < nbytes:
            buffer = memoryview(mmap(-1, max(1, nbytes)))  # a bytearray would be filled with zeros first
        return buffer[:nbytes]

    def _fill(self, file: int, buffer: memoryview, offset: int) -> None:
        at = 0
        while at < len(buffer):
            count = self._files.read(file, buffer[at:], offset + at)
            if count <= 0:
                raise SegmentError("torn")
            at += count

    @property
    def may_write(self) -> bool:
        """True unless writing has ended for good, pauses (`rest`), or has reached the most bytes of this day."""
        now_s = self._files.now_s()
        if not 0 <= now_s - self._day_s < _DAY_S:
            self._day_s = now_s
            self._written_today = 0
        if self.why_not_writing or self._written_today >= self._most_written:
            return False
        return not 0 < self._paused_until_s - now_s <= _LONGEST_PAUSE_S

    def publish(self, segment: Segment, reserve: Callable[[int], bool] = lambda _: True) -> bool | None:
        """Writes a segment completely. Returns True on success, and False after an error. Calls `reserve` with the size
        of the file, and returns None if `reserve` returns False, since there is no room."""
        name = segment.name
        if name in self.index:
            self.touch(name)
            return True
        parts = sealed(segment)
        size = sum(map(len, parts))
        try:
            self._make_folder()
            if not reserve(size):
                return None
            self._commit(parts, self.folder / name.file)
        except IsADirectoryError:  # no runner made this directory; other segments can still be written
            if not self.rejected["directory"]:
                log.warning("a directory has the name of a file of the disk cache: left alone", directory=name.file)
            self.rejected["directory"] += 1
            return True
        except OSError as error:
            self._failed(error)
            return False
        self._pause_s = _PAUSE_S
        self.written_bytes += size
        self._written_today += size
        self.index.add(name)
        return True

    def rest(self, why: str) -> None:
        """Stops writing for a minute. Each later pause is twice as long, an hour at most, until a write succeeds."""
        self._paused_until_s = self._files.now_s() + self._pause_s
        log.warning("the disk cache rests", why=why, seconds=self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _commit(self, parts: Sequence[memoryview], to: Path) -> None:
        """Writes a file, completely or not at all."""
        path = self.folder / temporary(os.getpid(), self._number)
        self._number += 1
        try:
            file = self._files.create(path)
            try:
                for part in parts:
                    self._write(file, part)
            finally:
                self._files.close(file)
            self._files.rename(path, to)
        except OSError:
            with suppress(OSError):  # a sweep removes the file later
                self._files.unlink(path)
            raise

    def _write(self, file: int, data: memoryview) -> None:
        at = 0
        while at < len(data):
            count = self._files.write(file, data[at:])
            if count <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            at += count

    def _make_folder(self) -> None:
        """Makes the folder with its about.json, unless that file exists."""
        about = self.folder / "about.json"
        if self._files.exists(about):
            return
        for folder in (self.folder.parent, self.folder):  # a person may have removed both while this runs
            self._files.make_directory(folder)
        self._commit([memoryview(self._about)], about)

    def _failed(self, error: OSError) -> None:
        self.write_errors += 1
        why = os.strerror(error.errno or 0)
        if error.errno in _FOR_GOOD:
            self.why_not_writing = why
            log.warning("the disk cache writes nothing any more", why=why, directory=str(self.folder))
        else:
            self.rest(why)
