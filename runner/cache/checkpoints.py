"""Chooses the checkpoints of a prompt: the offsets at which states and tails are kept.

A layer with a recurrent state or a filled window can return only to offsets at which this was copied. So the
checkpoints decide how many tokens of a later prompt have to be computed again. Prompts diverge where messages begin (an
edit, another tool result, another user), close to the end (the same prompt again, reasoning dropped from the answer),
and where earlier prompts diverged. A prompt that diverges elsewhere has, after that offset, about as many new tokens as
the earlier prompt had: with checkpoints at growing distances, the tokens computed again stay in proportion to these.

Conversations differ: an agent goes on where its answer ended, a chat drops its thinking and goes on where its prompt
ended. So every node has the habits of the conversations through it, from which the order of eviction takes the chance
of a checkpoint to be used.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import islice
from math import inf
from typing import NamedTuple, TypeAlias


class Site(IntEnum):
    """The sorts of places where a conversation goes on, those nearest to the end of an answer first."""

    END = 0  # the end of an answer: no checkpoint, but layers stand there
    BEFORE = 1  # a few tokens before the end of a prompt
    NEAR = 2  # the smallest distance from the end
    START = 3  # the start of a message
    FAR = 4  # any larger distance
    BRANCH = 5  # where another prompt diverged


Habits: TypeAlias = tuple[float, ...]
"""For each site, the share of the requests of a conversation that went on there."""
PRIOR: Habits = (0.45, 0.2, 0.1, 0.1, 0.05, 0.1)
_LEARNED = 0.1  # the weight of the last request in the habits


def learned(habits: Habits, site: Site) -> Habits:
    """Returns the habits after one more request, which went on at `site`."""
    return tuple(share + _LEARNED * ((each == site) - share) for each, share in enumerate(habits))


class Checkpoint(NamedTuple):
    """An offset at which states and tails are kept. The node that ends there stays, even if it has only one child."""

    at: int
    site: Site


_TURNS = 2  # the last messages of a prompt that get a checkpoint at their start
_FITTING = 1500  # tokens: a message start so close below the largest prompt that fits is better than that prompt's end
_BEFORE_END = 4  # tokens: a prompt that comes again may differ in its last few tokens


class CheckpointPolicy:
    """Places checkpoints a few tokens before the end; where another prompt diverges; at the starts of the last messages
    and of the first message after the system prompt; at distances from the end that grow; and at further starts of
    messages, not close to each other, where an edit makes a prompt diverge. A prompt that the budget has no room for
    gets one more, close below the largest that fits.

    Checkpoints that lie close together are merged into the earliest: to continue from there takes little time. No
    checkpoint lies inside an item of media, which some models compute as a whole.
    """

    def __init__(self, turn_tokens: frozenset[int] = frozenset(), *, first_distance: int = 256, gap: int = 32) -> None:
        """`turn_tokens` are the special tokens that chat templates put around messages. `first_distance` and `gap` are
        in tokens. Raises ValueError unless both are positive."""
        if min(first_distance, gap) < 1:
            raise ValueError("checkpoints need positive distances")
        self._turn_tokens = turn_tokens
        self._first_distance = first_distance
        self._gap = gap

    def plan(
        self, tokens: Sequence[int], cached: int, branch: int, most: int | None, fits: int | None = None
    ) -> list[Checkpoint]:
        """Returns checkpoints from `cached` to the last token of a prompt, in ascending order, at most `most` after
        `cached`. The first checkpoint may be `cached` itself, whose state is worth keeping. The cache knows the first
        `branch` tokens, not all: another prompt diverges there. It can keep a prompt of `fits` tokens."""
        end = len(tokens)
        starts = self._message_starts(tokens, cached)
        distances = self._distances(starts, self._beginning(tokens, starts, cached), end)
        chosen: dict[int, Site] = {}
        for at, site in (  # the most valuable checkpoints first
            *((at, Site.START) for at in self._fitting(starts, end, fits)),
            (end - _BEFORE_END, Site.BEFORE),
            (branch, Site.BRANCH),
            *((start, Site.START) for start in starts[: -_TURNS - 1 : -1]),
            *((start, Site.START) for start in starts[:1]),
            *((at, Site.FAR if far else Site.NEAR) for far, at in enumerate(distances)),
            *((start, Site.FAR) for start in self._apart(starts)),
        ):
            self._choose(chosen, _before_item(tokens, at), site, cached, most)
        return [Checkpoint(at, site) for at, site in sorted(chosen.items())]

    def left(self, tokens: Sequence[int], branch: int, node_end: int, site: Site) -> Site:
        """Returns the site at which a prompt left what the cache knew, after its first `branch` tokens: the `site` of
        the node where the layers stand, or the one that was missing between the two."""
        if branch - node_end < self._gap:
            return site
        return Site.FAR if self._turn_tokens.isdisjoint(islice(tokens, node_end + 1, branch + 1)) else Site.START

    def _choose(self, chosen: dict[int, Site], at: int, site: Site, cached: int, most: int | None) -> None:
        """Adds a checkpoint to `chosen`, merged with the chosen checkpoints close to it."""
        if abs(at - cached) < self._gap:
            at = cached
        close = [other for other in chosen if abs(other - at) < self._gap]
        full = most is not None and sum(other > cached for other in chosen) >= most
        if at < max(cached, 1) or (full and at > cached and not close):
            return
        for other in close:
            at, site = min(at, other), min(site, chosen.pop(other))
        chosen[at] = site

    def _message_starts(self, tokens: Sequence[int], cached: int) -> list[int]:
        """Returns the position of the first token of each group of turn tokens, from just before `cached` on. Leaves
        out the beginning of the prompt, where a checkpoint would save nothing."""
        begin = max(cached - self._gap, 0)
        starts: list[int] = []
        for at, token in enumerate(islice(tokens, begin, None), begin):
            if token in self._turn_tokens and not (starts and at - starts[-1] < self._gap):
                starts.append(at)
        return starts[bisect_left(starts, self._gap) :]

    def _fitting(self, starts: Sequence[int], end: int, fits: int | None) -> list[int]:
        """Returns the checkpoint to which a prompt of more than `fits` tokens is cut back."""
        if fits is None or not 0 < fits < end:
            return []
        return [max((start for start in starts if fits - _FITTING < start <= fits), default=fits)]

    def _apart(self, starts: Sequence[int]) -> Iterator[int]:
        """Yields message starts from the last to the first, so that each lies the first distance from the next."""
        last = inf
        for start in reversed(starts):
            if last - start >= self._first_distance:
                yield start
                last = start

    def _beginning(self, tokens: Sequence[int], starts: Sequence[int], cached: int) -> int:
        """Returns the offset after which to place checkpoints by distance: the end of the system prompt, which prompts
        share as a whole, or `cached`. A first message with only the answer after it is no system prompt."""
        in_first = self._turn_tokens.isdisjoint(islice(tokens, self._gap, cached))
        return starts[0] if in_first and len(starts) > 1 else cached

    def _distances(self, starts: Sequence[int], beginning: int, end: int) -> Iterator[int]:
        """Yields offsets after `beginning` at distances from the end that double twice and then grow fourfold, nearest
        first: the message start closest to such an offset, or the offset itself if no message starts near it."""
        distance = self._first_distance
        while end - distance * 3 // 2 > beginning:
            low, high = max(beginning, end - 2 * distance), end - distance
            middle = (low + high) // 2
            between = starts[bisect_right(starts, low) : bisect_right(starts, high)]
            yield min(between, key=lambda start: abs(start - middle), default=middle)
            distance *= 2 if distance < 4 * self._first_distance else 4


def _before_item(tokens: Sequence[int], at: int) -> int:
    """Returns the start of the item of media around an offset, or the offset itself outside of items."""
    while 0 < at < len(tokens) and tokens[at - 1] == tokens[at] < 0:
        at -= 1
    return at
