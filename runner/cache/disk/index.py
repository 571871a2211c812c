"""The index of one directory: its names by the points at their ends. Written by one thread; any may read."""

from collections import Counter
from collections.abc import Callable, Iterable

from runner.cache.disk.name import ENTRIES, Name, parse_name

_TOGETHER = 256  # names between two moments for other threads


class Index:
    """The names of the segments that are there, as far as this process knows. Every change is one assignment to a
    dictionary, so that readers see the state before it or the one after it."""

    def __init__(self, names: Iterable[Name] = ()) -> None:
        self.names: dict[str, Name] = {}
        """All, by file name."""
        self.starts: Counter[int] = Counter()
        """The number of segments of entries that start at an offset."""
        self.ends: Counter[int] = Counter()
        """The number of tails and states at an offset."""
        self.kinds: Counter[str] = Counter()
        """The number of segments of each kind."""
        self._after: dict[str, tuple[Name, ...]] = {}
        self._held: dict[tuple[str, str], Name] = {}
        for name in names:
            self.add(name)

    def __contains__(self, name: Name) -> bool:
        return name.file in self.names

    def after(self, point: str) -> tuple[Name, ...]:
        """Returns the segments of entries that start at a point."""
        return self._after.get(point, ())

    def held(self, kind: str, point: str) -> Name | None:
        """Returns the tail or the state at a point."""
        return self._held.get((kind, point))

    def add(self, name: Name) -> None:
        """Adds a segment, unless it is there."""
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
        """Removes a segment, if it is there."""
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
        """Makes the segments among these files the only ones. Only new ones take time, with `rest` now and then."""
        wanted = set(files)
        for file in self.names.keys() - wanted:
            self.discard(self.names[file])
        for count, file in enumerate(wanted - self.names.keys()):
            name = parse_name(file)
            if name is not None:
                self.add(name)
            if count % _TOGETHER == _TOGETHER - 1:
                rest()
