"""Where a prompt should be left resumable, for layers that cannot go back by themselves.

A recurrent state or a filled window is good for one offset only, so the offsets at which it is copied decide how much
of a later prompt has to be computed again. Prompts part where messages begin (an edit, another tool result, another
user), close to the end (the same prompt again, reasoning dropped from the answer), and where they parted before. What
parts elsewhere, some distance before the end, needs about that many tokens computed anyway: points at distances that
double keep the surplus in proportion.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol


class Checkpoint(NamedTuple):
    """An offset to stop at. `keep`: to be kept as a restore point of its own, whether or not anything branches off."""

    at: int
    keep: bool


class CheckpointPolicy(Protocol):
    """A policy."""

    def plan(self, tokens: Sequence[int], cached: int, branch: int, most: int | None) -> list[Checkpoint]:
        """Where to stop on the way from `cached` to the last token of a prompt, in order, `most` times at most. Before
        them `cached` itself may come: what stands there already is worth keeping.

        `branch` tokens of the prompt, less than all, are known to the cache: another prompt leaves this one there.
        """

    def expired(self, points: Sequence[int], end: int) -> list[int]:
        """Those of a conversation's restore points that need not be kept any more, now that it has `end` tokens."""


class TurnCheckpoints:
    """A few tokens before the end; where another prompt leaves; where the last messages begin, and the one after the
    system prompt; and in every doubling of the distance from the end.

    Of points that lie close together the earliest serves all: going on from it costs little.
    """

    def __init__(
        self,
        turn_tokens: frozenset[int] = frozenset(),
        *,
        turns: int = 4,
        before_end: int = 4,
        first_distance: int = 256,
        gap: int = 32,
        recent: int = 16,
    ) -> None:
        """`turn_tokens` are the added special tokens, which chat templates set around messages. All else in tokens, but
        `turns` and `recent`: how many messages of a prompt, and how many points of a conversation, count as the last.
        Raises ValueError unless all are positive.
        """
        if min(turns, before_end, first_distance, gap, recent) < 1:
            raise ValueError("restore points need positive distances and counts")
        self._turn_tokens = turn_tokens
        self._turns = turns
        self._before_end = before_end
        self._first_distance = first_distance
        self._gap = gap
        self._recent = recent

    def plan(self, tokens: Sequence[int], cached: int, branch: int, most: int | None) -> list[Checkpoint]:
        end = len(tokens)
        starts = self._message_starts(tokens, cached)
        chosen: dict[int, bool] = {}
        for at, keep in (  # the most valuable first
            (end - self._before_end, True),
            (branch, False),
            *((start, True) for start in starts[: -self._turns - 1 : -1]),
            *((start, True) for start in starts[:1]),
            *((at, True) for at in self._distances(starts, self._beginning(tokens, starts, cached), end)),
        ):
            self._choose(chosen, at, keep, cached, most)
        return [Checkpoint(at, keep) for at, keep in sorted(chosen.items())]

    def expired(self, points: Sequence[int], end: int) -> list[int]:
        """All but the last few, and of those before them the first and the last in each doubling of the distance from
        the end: the very first one stays."""
        by_distance: dict[int, list[int]] = {}
        for at in points[: -self._recent]:
            by_distance.setdefault(((end - at) // self._first_distance).bit_length(), []).append(at)
        return [at for group in by_distance.values() for at in group[1:-1]]

    def _choose(self, chosen: dict[int, bool], at: int, keep: bool, cached: int, most: int | None) -> None:
        """Adds a point, or joins it with those close to it."""
        if abs(at - cached) < self._gap:
            at = cached
        close = [other for other in chosen if abs(other - at) < self._gap]
        full = most is not None and sum(other > cached for other in chosen) >= most
        if at < max(cached, 1) or (full and at > cached and not close):
            return
        for other in close:
            at, keep = min(at, other), chosen.pop(other) or keep
        chosen[at] = keep

    def _message_starts(self, tokens: Sequence[int], cached: int) -> list[int]:
        """The first of each group of special tokens, from just before `cached` on. The prompt's own beginning is none,
        nothing is saved there."""
        begin = max(cached - self._gap, 0)
        starts: list[int] = []
        for at, token in enumerate(islice(tokens, begin, None), begin):
            if token in self._turn_tokens and not (starts and at - starts[-1] < self._gap):
                starts.append(at)
        return starts[bisect_left(starts, self._gap) :]

    def _beginning(self, tokens: Sequence[int], starts: Sequence[int], cached: int) -> int:
        """Where distances from the end begin to matter: not within a system prompt, which is shared as a whole. A first
        message that only the answer follows is none."""
        in_first = self._turn_tokens.isdisjoint(islice(tokens, self._gap, cached))
        return starts[0] if in_first and len(starts) > 1 else cached

    def _distances(self, starts: Sequence[int], beginning: int, end: int) -> Iterator[int]:
        """An offset in every doubling of the distance from the end that lies behind `beginning`, the nearest ones
        first: the start of a message where there is one, as close to the middle as can be."""
        distance = self._first_distance
        while end - distance * 3 // 2 > beginning:
            low, high = max(beginning, end - 2 * distance), end - distance
            middle = (low + high) // 2
            between = starts[bisect_right(starts, low) : bisect_right(starts, high)]
            yield min(between, key=lambda start: abs(start - middle), default=middle)
            distance *= 2
