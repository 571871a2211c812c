"""Segments made up for tests: two layers, of which one has entries and the other a state."""

import errno
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from random import Random

from runner.disk.files import Files
from runner.disk.points import PrefixDigests
from runner.disk.segment import ENTRIES, STATE, VERSION, Form, Layers, Name, Record, Segment, SegmentFacts, Tensor
from runner.disk.store import SegmentStore
from runner.disk.sweep import Sweep

ROOT = b"r" * 32
NAMESPACE = f"v{VERSION}-{'0' * 32}"


class CrashError(BaseException):
    """The process ends here."""


CALLS = (
    *("make_directory", "exists", "names", "changed_ns", "entries", "create", "write", "open", "plain", "size", "read"),
    *("exchange", "rename", "unlink"),
)


class FakeFiles(Files):
    """Real files, a made-up clock, and a fault at one call: an exception, or a short count."""

    def __init__(self, at: int | None = None, fault: BaseException | None = None) -> None:
        self.calls: list[str] = []
        self.at, self.fault = at, fault
        self.now = 1e9
        self.free = (1 << 50, 1 << 50)
        self.most_at_once: int | None = None

    def __getattribute__(self, name: str) -> object:
        """Counts the calls: a method is looked up when it is called."""
        if name in CALLS:
            self._call(name)
        return super().__getattribute__(name)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.at is not None and len(self.calls) - 1 == self.at and self.fault is not None:
            raise self.fault

    def write(self, file: int, data: memoryview) -> int:
        return super().write(file, data[: self.most_at_once])

    def read(self, file: int, into: memoryview, offset: int) -> int:
        return super().read(file, into[: self.most_at_once], offset)

    def close(self, file: int) -> None:
        super().close(file)  # a process that ends closes all of its files
        self._call("close")

    def touch(self, path: Path) -> None:
        self._call("touch")
        os.utime(path, (self.now, self.now))

    def space(self, path: Path) -> tuple[int, int]:
        self._call("space")
        return self.free

    def now_s(self) -> float:
        return self.now


ERRORS = [OSError(code, os.strerror(code)) for code in (errno.ENOSPC, errno.EROFS, errno.EIO, errno.ENOENT)]


def points(tokens: Sequence[int], salt: str = "") -> PrefixDigests:
    return PrefixDigests(ROOT, salt, tokens)


def named(tokens: Sequence[int], start: int, stop: int, kind: str = ENTRIES) -> Name:
    """Returns the segment of a prompt's tokens [start, stop)."""
    of = points(tokens)
    return Name(of.at(start if kind == ENTRIES else stop), of.at(stop), start, stop, kind)


def segment(tokens: Sequence[int], start: int, stop: int, kind: str = ENTRIES) -> Segment:
    """Returns a segment of a prompt, whose arrays depend on all tokens up to `stop`."""
    count = stop - start
    numbers = Random(repr(list(tokens[:stop])))
    if kind == ENTRIES:
        shapes = [Tensor("BF16", (1, 2, count, 4)), Tensor("F32", (1, 1, count, 3))]
        record = Record(0, start, tuple(shapes))
        data = array("i", tokens[start:stop]).tobytes()
    else:
        record, data = Record(1, start, (Tensor("F32", (1, 5)),), '["l",[["a",0]]]'), b""
    data += b"".join(numbers.randbytes(tensor.nbytes) for tensor in record.tensors)
    facts = SegmentFacts(named(tokens, start, stop, kind), NAMESPACE, {"0": "A", "1": "B"}, (record,))
    return Segment(facts, memoryview(data))


def store(directory: Path, files: Files | None = None, most_written: int = 1 << 40) -> SegmentStore:
    opened = SegmentStore(files or FakeFiles(), directory, NAMESPACE, b'{"model":"tiny"}', most_written)
    opened.open()
    return opened


LAYERS: Layers = {
    "0": Form(ENTRIES, "A", (Tensor("BF16", (1, 2, 16, 4)), Tensor("F32", (1, 1, 16, 3))), "", grows=False),
    "1": Form(STATE, "B", (Tensor("F32", (1, 5)),), '["l",[["a",0]]]', grows=False),
}
"""The layers that all of these segments are of."""
TOKENS = list(range(600))
STORY = [
    segment(TOKENS, 0, 40),
    segment(TOKENS, 39, 40, STATE),
    segment(TOKENS, 40, 80),
    segment([*TOKENS[:40], 9, 9, 9], 40, 43),
]
"""Segments of two conversations, and a state."""


def listed(directory: Path) -> list[str]:
    """Returns the names of the files of the namespace."""
    return [path.name for path in (directory / NAMESPACE).iterdir()]


def swept(files: FakeFiles, directory: Path, most: int = 1 << 40, age: float = 1e12) -> Sweep:
    """Sweeps once."""
    sweep = Sweep(files, directory, most, age)
    for _ in sweep.run():
        pass
    return sweep
