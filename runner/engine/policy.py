"""Decides from numbers alone which slice comes next; knows no model and no clock.

A decode step of a batch follows its previous one within `max_gap_s`. The time that this leaves belongs to new requests,
to prompts and to pictures. If it leaves too little, every round of steps is followed by one new request, one prompt
slice of `LEAST_SLICE_TOKENS`, or one piece of a picture. So the gap of a batch is at most `max_gap_s`, or one round and
that one slice if these take longer. The first step of an answer waits, as long, for short prompts that come with it, so
that their answers begin in one batch. Tokens that are known cost nothing, and are sent before that step. Two things
cannot be foreseen and come on top: a slice that takes longer than the last ones did, and the first step of a new batch.

New requests come before prompts and pictures, so that cached prompts are answered at once. But a client that keeps
sending would keep these waiting: after each of their slices, beginnings and the first steps that follow get only as
much time as that slice took.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from runner.settings import LEAST_SLICE_TOKENS

_FIRST_TOKENS = 32  # beside decoding batches, until the cost of a token is known
_STEP_TOKENS = 8  # larger slices are multiples of it
_WORTH = 0.5  # of the gap: a second forward between two steps is worth its cost only if the first one was cut short
_KNOWN = 0.5  # of the gap: known tokens are taken for so long before a step
_WEIGHT = 0.5  # of the latest measurement in an average


class Begin(NamedTuple):
    """Begin the next request that may begin."""

    def __bool__(self) -> bool:
        """True, like every other slice: an empty tuple would not be."""
        return True


class Prefill(NamedTuple):
    """Compute a slice of a prompt."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is of no use here
    """The prompt's index in `Workload.prefilling`."""
    tokens: int
    """The most tokens to compute."""


class Decode(NamedTuple):
    """Compute one step of a batch."""

    index: int  # type: ignore[assignment]  # as above
    """The batch's index in `Workload.decoding`."""
    computed: bool = True
    """False if the step had no forward: it has read a token before a round of drafts."""


class Encode(NamedTuple):
    """Compute one piece of the picture that waits longest."""

    def __bool__(self) -> bool:
        """True, as above."""
        return True


Slice = Begin | Prefill | Encode | Decode


class StepLimit(NamedTuple):
    """The limits of one step. A round of drafts keeps to one of the first two."""

    seconds: float = inf
    """A round takes no longer than this."""
    drafts: int = 0
    """A round has no more drafts than these, of all its answers."""
    ahead: bool = True
    """True if a step that first has to draw its tokens may dispatch the next forward before it reads them. A CPU
    computes as it dispatches, so that delays them by a forward."""


UNLIMITED = StepLimit()


class Workload(NamedTuple):
    """The work at hand."""

    startable: int = 0
    """The number of requests that could begin now: fewer than `--parallel` run, and there is memory."""
    prefilling: Sequence[int] = ()
    """The tokens that each prompt has left to prefill, in the order of arrival; each > 0."""
    decoding: Sequence[int] = ()
    """The ids of the batches that can step. A batch keeps its id."""
    encoding: int = 0
    """The number of prompts that wait for a picture which can be encoded."""
    joining: Sequence[int] = ()
    """The ids of the batches that would join another one, at least of those before their first step."""


@dataclass(slots=True)
class _Pace:
    """The timing of a batch."""

    slice: int
    """The number of its latest slice; 0 before the first."""
    end_s: float
    """The end of that slice, or when the batch began, on the policy's own clock."""
    step_s: float
    """The time of its steps with a forward: an average, which a longer step raises at once; 0 before the first."""


class SlicePolicy:
    """Chooses the next slice, and learns from how long it took. Only `took` changes anything.

    Owner: the engine thread. Its clock is the sum of all slices so far.
    """

    def __init__(self, chunk_tokens: int, max_gap_s: float) -> None:
        """`chunk_tokens` is the largest slice of a prompt, and the size of all slices while nothing decodes."""
        self.chunk_tokens = chunk_tokens
        self.max_gap_s = max_gap_s
        self._now_s = 0.0
        self._slices = 0
        self._last_other = 0  # the number of the latest slice that was not a step
        self._paces: dict[int, _Pace] = {}
        self._known_s = 0.0  # since the last step, for tokens that were known: they do not count as a slice
        self._begin_s = 0.0
        self._encode_s = 0.0
        self._encoded_last = False  # of prompts and pictures: they take turns
        self._token_s: float | None = None
        self._most_tokens = _FIRST_TOKENS  # at most doubles with each slice: the first measurements are rough
        self._balance_s = 0.0  # the time that the oldest prompt got, less that of the shortest
        self._prompt_s = 0.0  # the time of the latest slice of a prompt or a picture
        self._beginnings_s = 0.0  # since then, while others waited: the time of beginnings and first steps

    def next(self, work: Workload) -> Slice | None:
        """Returns the next slice; None if there is nothing to do."""
        if len(work.decoding) == 1 and not (work.startable or work.prefilling or work.encoding):
            return Decode(0)
        beginning = Begin() if work.startable and not self._owes_prompts(work) else None
        other = beginning or (Encode() if self._encodes(work) else None)
        if not work.decoding:
            return other or (self._next_prefill(work, self.chunk_tokens) if work.prefilling else None)
        step = Decode(min(range(len(work.decoding)), key=lambda index: self._last_slice(work.decoding[index])))
        # The first step of an answer, or of rows from other batches, waits only for short prompts whose answers join.
        is_first = self._last_slice(work.decoding[step.index]) == 0
        if is_first and work.decoding[step.index] not in work.joining:
            return step
        room_s = self._room_s(work.decoding)
        # Nothing has come between since the last step: there will never be more room.
        fresh = self._last_slice(work.decoding[step.index]) > self._last_other
        if other:  # prompts wait for it, or they would take the room that it needs
            return other if fresh or (self._begin_s if beginning else self._encode_s) <= room_s else step
        if not work.prefilling:
            return step
        tokens = self._tokens_in(room_s)
        prefill = self._next_prefill(work, max(tokens, LEAST_SLICE_TOKENS) if fresh else tokens)
        worth = not is_first and tokens >= LEAST_SLICE_TOKENS and room_s >= self.max_gap_s * _WORTH
        return prefill if fresh or worth or tokens >= work.prefilling[prefill.index] else step

    def step_limit(self, work: Workload, index: int) -> StepLimit:
        """Returns the limit of a step of the batch at this index, if that steps now, or of one that it joins. The gap
        is divided among the batches that take turns and the waiting prompts, less the time that other slices have used.
        If even a plain step exceeds its share and no prompt waits, a round may still carry LEAST_SLICE_TOKENS drafts:
        with prompts the gap would grow longer than without drafts."""
        prompts = bool(work.startable or work.prefilling or work.encoding)
        batches = len(work.decoding)
        share_s = self.max_gap_s / (batches + prompts)
        goes_on = batches == 1 and not prompts and self._last_other < self._slices
        ahead = goes_on or self._has_time_for_two_steps(work.decoding, share_s)
        if not prompts:
            return StepLimit(share_s, LEAST_SLICE_TOKENS // batches, ahead)
        left_s = self.max_gap_s - (self._now_s - self._pace(work.decoding[index]).end_s)
        return StepLimit(min(share_s, left_s), 0, ahead)

    def _has_time_for_two_steps(self, decoding: Sequence[int], share_s: float) -> bool:
        """Returns True if two steps take no longer than `share_s`, nor than the batch that waited longest has left of
        the gap."""
        paces = [self._pace(batch) for batch in decoding]
        waited_s = self._now_s - min(pace.end_s for pace in paces)
        return 0 < 2 * max(pace.step_s for pace in paces) <= min(share_s, self.max_gap_s - waited_s)

    def took(self, slice: Slice, work: Workload, seconds: float) -> None:  # noqa: A002 - it is the field's word
        """Learns how long a slice took that `next` returned for this work.

        `slice` is what was really done: `slice._replace(tokens=computed)` if a prefill computed fewer tokens than it
        was given, and the batch that stepped if it was another one. A slice that failed may be left out.
        """
        for batch in work.decoding:
            if batch not in self._paces:
                self._paces[batch] = self._pace(batch)
        self._now_s += seconds
        self._slices += 1
        if len(self._paces) > len(work.decoding):
            self._paces = {batch: self._paces[batch] for batch in work.decoding if batch in self._paces}
        if isinstance(slice, Decode):
            if not self._paces[work.decoding[slice.index]].slice:
                self._began(work, seconds)
            self._stepped(work.decoding[slice.index], seconds if slice.computed else None)
            self._known_s = 0.0
            return
        if isinstance(slice, Prefill) and not slice.tokens:
            self._known_s += seconds
            if self._known_s <= self.max_gap_s * _KNOWN:
                return
        self._last_other = self._slices
        if isinstance(slice, Begin):
            self._begin_s += (seconds - self._begin_s) * _WEIGHT
            self._began(work, seconds)
            return
        self._prompt_s, self._beginnings_s = seconds, 0.0
        if isinstance(slice, Encode):
            self._encode_s += (seconds - self._encode_s) * (1.0 if seconds > self._encode_s else _WEIGHT)
            self._encoded_last = True
        elif slice.tokens > 0:
            self._encoded_last = False
            self._measure(slice.tokens, seconds)
            if _shortest(work.prefilling) > 0:
                self._balance_s += -seconds if slice.index else seconds

    def _began(self, work: Workload, seconds: float) -> None:
        """Counts a beginning, or a first step, if prompts or pictures wait."""
        self._beginnings_s = self._beginnings_s + seconds if work.prefilling or work.encoding else 0.0

    def _stepped(self, batch: int, seconds: float | None) -> None:
        """Updates the pace of a batch. Rounds of drafts take longer than steps between them, so a longer one counts at
        once."""
        step_s = self._paces[batch].step_s
        if seconds is not None:
            step_s = max(seconds, step_s + (seconds - step_s) * _WEIGHT)
        self._paces[batch] = _Pace(self._slices, self._now_s, step_s)

    def _measure(self, tokens: int, seconds: float) -> None:
        """Updates the cost of a token. It grows with the context, so a higher cost counts at once; short slices count
        little."""
        self._most_tokens = max(self._most_tokens, 2 * tokens)
        token_s = seconds / tokens
        if self._token_s is None:
            self._token_s = token_s
        weight = min(1.0, tokens / _FIRST_TOKENS) * (1.0 if token_s > self._token_s else _WEIGHT)
        self._token_s += (token_s - self._token_s) * weight

    def _owes_prompts(self, work: Workload) -> bool:
        """Returns True if beginnings have used up their time since the latest slice of a prompt or a picture."""
        return bool(work.prefilling or work.encoding) and self._beginnings_s > self._prompt_s

    def _encodes(self, work: Workload) -> bool:
        """Returns True if a picture comes next, and not a slice of a prompt."""
        return work.encoding > 0 and not (work.prefilling and self._encoded_last)

    def _pace(self, batch: int) -> _Pace:
        return self._paces.get(batch) or _Pace(0, self._now_s, 0.0)

    def _last_slice(self, batch: int) -> int:
        return self._pace(batch).slice

    def _room_s(self, decoding: Sequence[int]) -> float:
        """Returns the seconds that another slice may take if all batches step after it, in the order of their
        waiting."""
        room_s, steps_s = self.max_gap_s, 0.0
        for batch in sorted(map(self._pace, decoding), key=lambda batch: batch.slice):
            steps_s += batch.step_s
            room_s = min(room_s, self.max_gap_s - (self._now_s - batch.end_s) - steps_s)
        return room_s

    def _tokens_in(self, room_s: float) -> int:
        """Returns the tokens of a prompt that can be computed in `room_s`."""
        if room_s <= 0:
            return 0
        token_s = self._token_s or 0.0
        tokens = int(room_s / token_s) if token_s * self.chunk_tokens > room_s else self.chunk_tokens
        tokens = min(tokens, self._most_tokens)
        return tokens - tokens % _STEP_TOKENS if tokens > LEAST_SLICE_TOKENS else tokens

    def _next_prefill(self, work: Workload, tokens: int) -> Prefill:
        """Returns a slice of the oldest or of the shortest prompt, which share the time equally."""
        index = _shortest(work.prefilling) if self._balance_s >= 0 else 0
        return Prefill(index, min(tokens, work.prefilling[index], self.chunk_tokens))


def _shortest(prefilling: Sequence[int]) -> int:
    return min(range(len(prefilling)), key=prefilling.__getitem__)
