"""Reads what the shelf has of a prompt. Owner: the disk thread."""

from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple

from runner.cache.node import common_prefix
from runner.disk.index import branch, chain, held_at, partial, standing
from runner.disk.segment import (
    ENTRIES,
    STATE,
    TAIL,
    DigestOf,
    Layers,
    Name,
    Points,
    Segment,
    Tokens,
    UnknownPictureError,
)
from runner.disk.shelf import Shelf

WORTH_TOKENS = 256
"""The least that a restore must save."""
_MOST_ROUNDS = 4  # plans for one prompt: each damaged file costs one
_MOST_SIBLINGS = 8  # segments whose tokens are compared with the prompt


class Wanted(NamedTuple):
    """A prompt, and what memory holds of it."""

    tokens: Tokens
    salt: str
    held: int
    """The tokens that need not be read."""
    needs: Callable[[int], int]
    """Returns the first token that tails must hold to stand at an offset."""
    layers: Layers
    """The forms that a segment must have."""


class Found(NamedTuple):
    """A segment that was read. `prefix` are the tokens from the first of the prompt to the end of the segment, which
    may go beyond what the prompt has in common with it."""

    segment: Segment
    prefix: Tokens


class Reader:
    """Finds and reads segments, in the order in which they are adopted."""

    def __init__(
        self,
        shelf: Shelf,
        root: bytes,
        digest_of: DigestOf = lambda _: None,
        name_of: Callable[[bytes], int] = lambda _: 0,
    ) -> None:
        """`root` is the digest of the namespace. `digest_of` and `name_of` translate the pictures of this process."""
        self._shelf, self._root = shelf, root
        self._digest_of, self._name_of = digest_of, name_of

    def read(self, wanted: Wanted) -> Iterator[Found]:
        """Yields what there is of a prompt; nothing if that saves too little. A damaged file ends one plan, and the
        next does without it."""
        points = Points(self._root, wanted.salt, wanted.tokens, self._digest_of)
        given: dict[Name, bool] = {}
        for _ in range(_MOST_ROUNDS):
            try:
                names, stop = self._plan(points, wanted)
            except UnknownPictureError:
                return
            if stop < wanted.held + WORTH_TOKENS:
                return
            whole = True
            last = list[Found]()
            # States first: without one that is whole the entries up to it are of no use.
            for name in sorted(names, key=lambda each: each.kind == ENTRIES):
                if name in given:
                    continue
                found = self._found(points, wanted, name)
                if found is None:
                    whole = False
                    for other in names:  # what is wrong in the same way goes with it
                        if other not in given:
                            self._shelf.read(other, wanted.layers, only_tokens=True)
                    break
                given[name] = True
                if name.kind == ENTRIES:
                    yield found
                else:
                    last.append(found)
            if not whole:
                for found in last:
                    given.pop(found.segment.name)
                continue
            yield from last
            for name in reversed(names):
                self._shelf.touch(name)
            return

    def _plan(self, points: Points, wanted: Wanted) -> tuple[list[Name], int]:
        """Returns the segments to read, and the tokens that can be reused then."""
        index = self._shelf.index
        kept = chain(index, points)
        if index.kinds[TAIL] or index.kinds[STATE]:
            most = len(points.tokens) - 1
            at = standing(index, points, min(most, kept.stop) if index.kinds[ENTRIES] else most)
            if at is None:
                return [], 0
            entries = [name for name in kept.names if name.start < at and name.stop > wanted.held]
            return [*entries, *held_at(index, points, at, wanted.needs)], at
        names, stop = kept
        best: tuple[int, Name] | None = None
        for name in partial(index, points, stop)[:_MOST_SIBLINGS]:
            looked = self._shelf.read(name, wanted.layers, only_tokens=True)
            tokens = self._tokens(points, looked) if looked is not None else None
            if tokens is not None:
                shared = stop + common_prefix(points.tokens[stop : name.stop], tokens)
                best = max(best or (stop, name), (shared, name))
        if best is not None and best[0] > stop:
            rest = branch(index, points, stop, best[0])
            names, stop = [*names, best[1], *rest.names], rest.stop
        return [name for name in names if name.stop > wanted.held], stop

    def _found(self, points: Points, wanted: Wanted, name: Name) -> Found | None:
        segment = self._shelf.read(name, wanted.layers)
        if segment is None or name.kind != ENTRIES:
            return segment and Found(segment, points.tokens[: name.stop])
        own = self._tokens(points, segment)
        return None if own is None else Found(segment, points.tokens[: name.start] + own)

    def _tokens(self, points: Points, segment: Segment) -> "Tokens | None":
        """Returns the tokens of a segment, with the names that its pictures have in this process. None, and the file is
        removed, unless they are those that it is named after: it may be damaged, or wrong from the start."""
        name, own = segment.name, segment.tokens
        try:
            digests = [bytes.fromhex(digest) for digest in segment.facts.pictures]
            found = points.after(name.start, own, lambda token: digests[-1 - token] if -token <= len(digests) else None)
            if (points.at(name.start), found) == (name.first, name.last):
                names = [self._name_of(digest) for digest in digests]
                return array("i", (token if token >= 0 else names[-1 - token] for token in own)) if names else own
        except (ValueError, UnknownPictureError):
            pass
        self._shelf.reject(name, "tokens")
        return None
