"""Reads the segments of a prompt. `chain` to `held_at` choose segments by names alone. Owner: the disk thread."""

from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple

from runner.cache.node import common_prefix
from runner.disk.points import DigestOf, PrefixDigests, Tokens, UnknownMediaError
from runner.disk.segment import ENTRIES, STATE, TAIL, Layers, Name, Segment
from runner.disk.store import Index, SegmentStore

MOST_TOKENS = 256
"""The most tokens of a segment of entries."""
WORTH_TOKENS = 256
"""The fewest tokens that a restore must save."""
_MOST_ROUNDS = 4  # the most plans for one prompt: a damaged file makes a new plan necessary
_MOST_SIBLINGS = 8  # after a prompt's chain, the most segments whose tokens are compared with the prompt


class Chain(NamedTuple):
    """Segments of entries that together hold the prompt's tokens up to `stop`, without a gap."""

    names: list[Name]
    stop: int


def chain(index: Index, points: PrefixDigests) -> Chain:
    """Returns the segments that hold the beginning of the prompt. Where several segments continue the chain, takes the
    longest. Segments may overlap: a conversation may branch off in the middle of a segment, or another process may have
    cut the same tokens elsewhere."""
    found, at = list[Name](), 0
    while (name := _longest(index, points, at, at) or _branch(index, points, max(1, at - MOST_TOKENS), at)) is not None:
        found.append(name)
        at = name.stop
    return Chain(found, at)


def branch(index: Index, points: PrefixDigests, start: int, stop: int) -> Chain:
    """Returns the chain that continues at `stop`. There the prompt parts from a segment that starts at `start`, or
    memory ends. The chain's first segment starts after `start`."""
    found, at = list[Name](), stop
    name = _branch(index, points, max(start + 1, stop - MOST_TOKENS), stop)
    while name is not None:
        found.append(name)
        at = name.stop
        name = _longest(index, points, at, at)
    return Chain(found, at)


def partial(index: Index, points: PrefixDigests, at: int) -> list[Name]:
    """Returns the segments that start at `at` and part from the prompt before they end."""
    return [name for name in index.after(points.at(at)) if not _spells(points, name)]


def deepest_state(index: Index, points: PrefixDigests, most: int) -> int | None:
    """Returns the largest offset up to `most` at which the index has both a state and a tail. If the index lacks one of
    the two kinds altogether, the other kind is enough. Returns None if there is no such offset."""
    kinds = [kind for kind in (STATE, TAIL) if index.kinds[kind]]
    ends = sorted(end for end, count in list(index.ends.items()) if count and end <= most)
    known = [points.at(end) for end in ends]  # ascending, so that each hash continues the hash before
    for at, point in zip(reversed(ends), reversed(known), strict=True):
        if all(index.held(kind, point) for kind in kinds):
            return at
    return None


def held_at(index: Index, points: PrefixDigests, at: int, needs: Callable[[int], int]) -> list[Name]:
    """Returns the tails and the state that restore layers to the offset `at`, in the order of the tokens. `needs(at)`
    returns the first token that tails must hold for that."""
    least = needs(at)
    ends = sorted(end for end, count in list(index.ends.items()) if count and least < end <= at)
    tails = [index.held(TAIL, points.at(end)) for end in ends]
    return [name for name in (*tails, index.held(STATE, points.at(at))) if name is not None]


def _longest(index: Index, points: PrefixDigests, start: int, beyond: int) -> Name | None:
    """Returns the longest segment of only tokens of the prompt that starts at `start` and ends after `beyond`."""
    found = [name for name in index.after(points.at(start)) if name.stop > beyond]
    return next((name for name in sorted(found, key=lambda each: -each.stop) if _spells(points, name)), None)


def _branch(index: Index, points: PrefixDigests, low: int, stop: int) -> Name | None:
    """Returns the segment of the prompt that starts in [low, stop] and ends furthest after `stop`."""
    starts = [at for at in range(low, stop + 1) if index.starts[at]]
    found = [name for at in starts if (name := _longest(index, points, at, stop)) is not None]
    return max(found, key=lambda name: name.stop, default=None)


def _spells(points: PrefixDigests, name: Name) -> bool:
    """Returns True if the prompt has all tokens of a segment. The segment must start at a point of the prompt."""
    return name.stop <= len(points.tokens) and points.at(name.stop) == name.last


class Wanted(NamedTuple):
    """A prompt whose segments are wanted."""

    tokens: Tokens
    salt: str
    held: int
    """The number of the prompt's first tokens that the cache in memory has."""
    needs: Callable[[int], int]
    """Returns the first token that tails must hold for layers to be restored to an offset."""
    layers: Layers
    """The forms of the model's layers."""


class FoundSegment(NamedTuple):
    """A segment that was read."""

    segment: Segment
    prefix: Tokens
    """All tokens up to the segment's end. The last of them may differ from the prompt."""


class Reader:
    """Finds and reads segments, in the order in which the trie can insert them."""

    def __init__(
        self,
        store: SegmentStore,
        root: bytes,
        digest_of: DigestOf = lambda _: None,
        name_of: Callable[[bytes], int] = lambda _: 0,
    ) -> None:
        """`root` is `Namespace.root`. `digest_of` turns a picture's name into its digest, `name_of` turns it back."""
        self._store = store
        self._root = root
        self._digest_of = digest_of
        self._name_of = name_of

    def read_prompt(self, wanted: Wanted) -> Iterator[FoundSegment]:
        """Yields the segments of a prompt. Yields none if they would restore fewer than `WORTH_TOKENS` tokens. After a
        damaged file, makes a new plan without that file."""
        points = PrefixDigests(self._root, wanted.salt, wanted.tokens, self._digest_of)
        given = set[Name]()
        for _ in range(_MOST_ROUNDS):
            try:
                names, stop = self._plan(points, wanted)
            except UnknownMediaError:
                return
            if stop < wanted.held + WORTH_TOKENS:
                return
            # Tails and states are read first: without them the entries before them are useless.
            needed = [name for name in names if name.kind != ENTRIES]
            last = [found for name in needed if (found := self._found(points, wanted, name)) is not None]
            complete = len(last) == len(needed)
            for name in names:
                if complete and name.kind == ENTRIES and name not in given:
                    found = self._found(points, wanted, name)
                    if found is not None:
                        given.add(name)
                        yield found
                    complete = found is not None
            if complete:
                yield from last
                for name in reversed(names):
                    self._store.touch(name)
                return
            for name in names:  # finds and removes files with the same damage, before the next plan
                if name not in given:
                    self._store.read_segment(name, wanted.layers, only_tokens=True)

    def _plan(self, points: PrefixDigests, wanted: Wanted) -> tuple[list[Name], int]:
        """Returns the segments to read, in the order of the tokens, and the offset to which they restore layers."""
        index = self._store.index
        names, stop = self._chain(points, wanted)
        if index.kinds[TAIL] or index.kinds[STATE]:
            most = len(points.tokens) - 1
            at = deepest_state(index, points, min(most, stop) if index.kinds[ENTRIES] else most)
            if at is None:
                return [], 0
            entries = [name for name in names if name.start < at and name.stop > wanted.held]
            return [*entries, *held_at(index, points, at, wanted.needs)], at
        return [name for name in names if name.stop > wanted.held], stop

    def _chain(self, points: PrefixDigests, wanted: Wanted) -> Chain:
        """Returns the segments that hold the beginning of the prompt, as `chain` does, also where the prompt parts from
        a segment: the next one may start inside that segment. Memory may have the tokens before the first segment."""
        index = self._store.index
        names, stop = chain(index, points)
        if stop <= wanted.held and (after := branch(index, points, 0, wanted.held)).names:
            names, stop = after
        while True:
            best: tuple[int, Name] | None = None
            for name in partial(index, points, stop)[:_MOST_SIBLINGS]:
                looked = self._store.read_segment(name, wanted.layers, only_tokens=True)
                tokens = self._tokens(points, looked) if looked is not None else None
                if tokens is not None:
                    shared = stop + common_prefix(points.tokens[stop : name.stop], tokens)
                    best = max(best or (stop, name), (shared, name))
            if best is None or best[0] == stop:
                return Chain(names, stop)
            rest = branch(index, points, stop, best[0])
            names, stop = [*names, best[1], *rest.names], rest.stop

    def _found(self, points: PrefixDigests, wanted: Wanted, name: Name) -> FoundSegment | None:
        segment = self._store.read_segment(name, wanted.layers)
        if segment is None:
            return None
        if name.kind != ENTRIES:
            return FoundSegment(segment, points.tokens[: name.stop])
        own = self._tokens(points, segment)
        return FoundSegment(segment, points.tokens[: name.start] + own) if own is not None else None

    def _tokens(self, points: PrefixDigests, segment: Segment) -> "Tokens | None":
        """Returns the tokens of a segment, with pictures by their names in this process. If the tokens do not have the
        points of the segment's name, removes the segment and returns None."""
        name, own = segment.name, segment.tokens
        try:
            digests = [bytes.fromhex(digest) for digest in segment.facts.pictures]
            found = points.after(name.start, own, lambda token: digests[-1 - token] if -token <= len(digests) else None)
            if (points.at(name.start), found) == (name.first, name.last):
                names = [self._name_of(digest) for digest in digests]
                return array("i", (token if token >= 0 else names[-1 - token] for token in own)) if names else own
        except (ValueError, UnknownMediaError):
            pass
        self._store.reject(name, "tokens")
        return None
