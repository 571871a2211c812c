"""The index of one directory: its names by the points at their ends. Written by one thread; any may read."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from runner.disk.segment import ENTRIES, STATE, TAIL, Name, Points, parse_name

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


# --- Which segments hold the beginning of a prompt, from their names alone. Pure.

MOST_TOKENS = 256
"""The longest segment."""


class Chain(NamedTuple):
    """Segments of entries that hold the tokens from the first on, without a gap, up to `stop`."""

    names: list[Name]
    stop: int


def chain(index: Index, points: Points) -> Chain:
    """Returns the segments all of whose tokens the prompt begins with. Where several go on, takes the longest.

    Segments may overlap: another conversation branches off in the middle of one, or another process cut them otherwise.
    """
    found, at = list[Name](), 0
    while (name := _longest(index, points, at, at) or _branch(index, points, max(1, at - MOST_TOKENS), at)) is not None:
        found.append(name)
        at = name.stop
    return Chain(found, at)


def branch(index: Index, points: Points, start: int, stop: int) -> Chain:
    """Goes on where tokens up to `stop` are held by a segment from `start` on of which the prompt is only a beginning:
    what follows, in another segment, starts inside of it."""
    found, at = list[Name](), stop
    name = _branch(index, points, start + 1, stop)
    while name is not None:
        found.append(name)
        at = name.stop
        name = _longest(index, points, at, at)
    return Chain(found, at)


def partial(index: Index, points: Points, at: int) -> list[Name]:
    """Returns the segments that start at `at`: the prompt may begin with some of their tokens."""
    return [name for name in index.after(points.at(at)) if not _spells(points, name)]


def standing(index: Index, points: Points, most: int) -> int | None:
    """Returns the largest offset up to `most` at which there are states and tails, as far as the model has such layers;
    None if there is no such offset. Models that have none are told by `index.kinds`."""
    kinds = [kind for kind in (STATE, TAIL) if index.kinds[kind]]
    ends = sorted(end for end, count in list(index.ends.items()) if count and end <= most)
    known = [points.at(end) for end in ends]  # the first one first: each goes on from the one before it
    for at, point in zip(reversed(ends), reversed(known), strict=True):
        if all(index.held(kind, point) for kind in kinds):
            return at
    return None


def held_at(index: Index, points: Points, at: int, needs: Callable[[int], int]) -> list[Name]:
    """Returns the tails and the state that take layers to `at`, in the order of the tokens. `needs(at)` is the first
    token that a tail must hold to stand there."""
    least = needs(at)
    ends = sorted(end for end, count in list(index.ends.items()) if count and least < end <= at)
    tails = [index.held(TAIL, points.at(end)) for end in ends]
    return [name for name in (*tails, index.held(STATE, points.at(at))) if name is not None]


def _longest(index: Index, points: Points, start: int, beyond: int) -> Name | None:
    """Returns the longest segment that starts at `start`, ends behind `beyond`, and is spelled by the prompt."""
    found = [name for name in index.after(points.at(start)) if name.stop > beyond]
    return next((name for name in sorted(found, key=lambda each: -each.stop) if _spells(points, name)), None)


def _branch(index: Index, points: Points, low: int, stop: int) -> Name | None:
    """Returns the segment that starts in [low, stop] and leads furthest beyond `stop`."""
    starts = [at for at in range(low, stop + 1) if index.starts[at]]
    found = [name for at in starts if (name := _longest(index, points, at, stop)) is not None]
    return max(found, key=lambda name: name.stop, default=None)


def _spells(points: Points, name: Name) -> bool:
    """Returns True if the prompt has all tokens of a segment that starts on its way."""
    return name.stop <= len(points.tokens) and points.at(name.stop) == name.last
