"""Which segments hold the beginning of a prompt, from their names alone. Pure."""

from collections.abc import Callable
from typing import NamedTuple

from runner.cache.disk.index import Index
from runner.cache.disk.name import STATE, TAIL, Name
from runner.cache.disk.point import Points

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
