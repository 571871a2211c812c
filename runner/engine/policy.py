"""Which slice comes next, decided from numbers alone: it knows no model and no clock.

A decode step of a group follows the one before within `max_gap_s`; what time that leaves belongs to beginnings and
prompts, and where there are none to the trial of batches. Where it leaves too little, one beginning or one slice of
`LEAST_TOKENS`, or one of the trial, which takes no longer, follows every round of steps. So the
gap of a group is at most `max_gap_s`, or a round and that one slice where these take longer. What cannot be foreseen
comes on top: a slice that takes longer than the last ones did, and the first step of a group that is new.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

LEAST_TOKENS = 16
"""A forward over fewer tokens of a prompt is hardly cheaper than one over so many."""
_FIRST_TOKENS = 32  # beside decoding groups, while nobody knows what a token costs
_STEP_TOKENS = 8  # larger slices are multiples of it
_WORTH = 0.5  # of the gap: a second forward between two steps is worth its cost only where the first one was cut short
_WEIGHT = 0.5  # of the last measurement in an average


class Begin(NamedTuple):
    """Start the next request that may start."""

    def __bool__(self) -> bool:
        """True, like every other slice: an empty tuple would not be."""
        return True


class Prefill(NamedTuple):
    """Compute a part of a prompt."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is of no use here
    """In `View.prefilling`."""
    tokens: int
    """At most so many."""


class Decode(NamedTuple):
    """Let a group step once."""

    index: int  # type: ignore[assignment]  # as above
    """In `View.decoding`."""


class Try(NamedTuple):
    """Advance the trial that says whether groups may become one."""

    def __bool__(self) -> bool:
        """True, as above."""
        return True


Slice = Begin | Prefill | Decode | Try


class View(NamedTuple):
    """What there is to do. A place is what a request occupies from its beginning to its end."""

    startable: int = 0
    """Requests that could begin: they wait, a place is free, memory is there."""
    prefilling: Sequence[int] = ()
    """The tokens that are left to prefill of each, in the order of their arrival; each > 0."""
    decoding: Sequence[int] = ()
    """The groups that decode: an id of each, which stays as long as the group lives."""
    trial: bool = False
    """Whether groups wait for the end of the trial."""


@dataclass(slots=True)
class _Pace:
    """How a group that has stepped gets on."""

    slice: int
    """The number of the slice in which it stepped last."""
    end_s: float
    """When that slice ended, on the schedule's own clock."""
    step_s: float
    """How long its steps take."""


class SlicePolicy:
    """Says what comes next, and learns from what came. `next` changes nothing, `took` all there is to change.

    Owner: the engine thread. Its clock is the sum of the slices.
    """

    def __init__(self, chunk_tokens: int, max_gap_s: float) -> None:
        """`chunk_tokens`: the largest slice of a prompt, and every one while nothing decodes."""
        self._chunk_tokens = chunk_tokens
        self._max_gap_s = max_gap_s
        self._now_s = 0.0
        self._slices = 0
        self._held_up = 0  # the number of the last slice that was not a step
        self._groups: dict[int, _Pace] = {}
        self._begin_s = self._try_s = 0.0
        self._token_s: float | None = None
        self._most_tokens = _FIRST_TOKENS  # doubles from slice to slice: the first measurements are not trusted far
        self._balance_s = 0.0  # what the oldest prompt got more than the shortest

    def next(self, view: View) -> Slice | None:
        """The next slice; None when there is nothing to do."""
        if not view.decoding:
            if view.startable:
                return Begin()
            return self._part(view, self._chunk_tokens) if view.prefilling else None
        if len(view.decoding) == 1 and not view.startable and not view.prefilling:
            return Decode(0)
        step = Decode(min(range(len(view.decoding)), key=lambda index: self._last_slice(view.decoding[index])))
        if view.decoding[step.index] not in self._groups:
            return step  # the first token of an answer, or rows of other groups, which have waited there
        room_s = self._room_s(view.decoding)
        # Nobody has been held up since the last step: there will never be more room.
        fresh = self._last_slice(view.decoding[step.index]) > self._held_up
        if view.startable:  # prompts wait for it, lest they take the room that it waits for
            return Begin() if fresh or self._begin_s <= room_s else step
        if not view.prefilling:
            return Try() if view.trial and (fresh or self._try_s <= room_s) else step
        tokens = self._tokens_in(room_s)
        part = self._part(view, max(tokens, LEAST_TOKENS) if fresh else tokens)
        worth = tokens >= LEAST_TOKENS and room_s >= self._max_gap_s * _WORTH
        return part if fresh or worth or tokens >= view.prefilling[part.index] else step

    def took(self, slice: Slice, view: View, seconds: float) -> None:  # noqa: A002 - it is the field's word
        """Learn how long the slice took that `next` gave for this view.

        Tell what was really done: `slice._replace(tokens=computed)` of a prefill that computed fewer tokens than it was
        given, and the group that stepped if it was another one. A slice that failed may be told or not.
        """
        self._now_s += seconds
        self._slices += 1
        if len(self._groups) > len(view.decoding):
            self._groups = {group: self._groups[group] for group in view.decoding if group in self._groups}
        if isinstance(slice, Decode):
            self._stepped(view.decoding[slice.index], seconds)
            return
        self._held_up = self._slices
        if isinstance(slice, Begin):
            self._begin_s += (seconds - self._begin_s) * _WEIGHT
        elif isinstance(slice, Try):
            self._try_s += (seconds - self._try_s) * _WEIGHT
        elif slice.tokens > 0:
            self._measure(slice.tokens, seconds)
            if _shortest(view.prefilling) > 0:
                self._balance_s += -seconds if slice.index else seconds

    def _stepped(self, group: int, seconds: float) -> None:
        known = self._groups.get(group)
        step_s = known.step_s + (seconds - known.step_s) * _WEIGHT if known else seconds
        self._groups[group] = _Pace(self._slices, self._now_s, step_s)

    def _measure(self, tokens: int, seconds: float) -> None:
        """What a token costs. It grows with the context, so a larger cost counts at once; a few tokens say little."""
        self._most_tokens = max(self._most_tokens, 2 * tokens)
        token_s = seconds / tokens
        if self._token_s is None:
            self._token_s = token_s
        weight = min(1.0, tokens / _FIRST_TOKENS) * (1.0 if token_s > self._token_s else _WEIGHT)
        self._token_s += (token_s - self._token_s) * weight

    def _last_slice(self, group: int) -> int:
        return self._groups[group].slice if group in self._groups else 0

    def _room_s(self, decoding: Sequence[int]) -> float:
        """How long something else may take if all groups then step, those first that waited longest."""
        room_s, steps_s = self._max_gap_s, 0.0
        for group in sorted((self._groups[group] for group in decoding), key=lambda group: group.slice):
            steps_s += group.step_s
            room_s = min(room_s, self._max_gap_s - (self._now_s - group.end_s) - steps_s)
        return room_s

    def _tokens_in(self, room_s: float) -> int:
        """How many tokens of a prompt may be computed in so many seconds."""
        if room_s <= 0:
            return 0
        token_s = self._token_s or 0.0
        tokens = int(room_s / token_s) if token_s * self._chunk_tokens > room_s else self._chunk_tokens
        tokens = min(tokens, self._most_tokens)
        return tokens - tokens % _STEP_TOKENS if tokens > LEAST_TOKENS else tokens

    def _part(self, view: View, tokens: int) -> Prefill:
        """Of the prompt whose turn it is: the oldest and the shortest share the time."""
        index = _shortest(view.prefilling) if self._balance_s >= 0 else 0
        return Prefill(index, min(tokens, view.prefilling[index], self._chunk_tokens))


def _shortest(prefilling: Sequence[int]) -> int:
    return min(range(len(prefilling)), key=prefilling.__getitem__)
