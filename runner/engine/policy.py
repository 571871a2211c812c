"""Chooses the next slice from numbers alone, without a model or a clock.

The steps of a batch follow each other within `max_gap_s`. The time between two steps belongs to new requests, prompts
and pictures. If that time is too short, each batch makes one step, and then follows one new request, one prompt
slice of `LEAST_SLICE_TOKENS`, or one piece of a picture. So the gap of a batch is at most `max_gap_s`, or the time of
these steps and that slice if longer. The first step of an answer waits equally long for short prompts beside it, so
that their answers begin in one batch. Known first tokens cost nothing, and are sent before that step. Two delays
cannot be foreseen and add to the gap: a slice longer than the latest ones, and the first step of a new batch.

New requests come before prompts and pictures, so that cached prompts are answered immediately. But a client that keeps
sending must not stop prompts and pictures: after each slice of a prompt or picture, beginnings and first steps get
together only the time that this slice took.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from runner.settings import LEAST_SLICE_TOKENS

_FIRST_TOKENS = 32  # a slice beside decoding batches, until the cost of a token is known
_STEP_TOKENS = 8  # slices above LEAST_SLICE_TOKENS are multiples of this
_WORTH = 0.5  # a second slice between two steps needs at least this part of the gap
_KNOWN = 0.5  # before a step, known tokens are taken for at most this part of the gap
_WEIGHT = 0.5  # the weight of the latest measurement in an average


class Begin(NamedTuple):
    """The slice that begins the next request."""

    def __bool__(self) -> bool:
        """True, as for every slice; an empty tuple would be False."""
        return True


class Prefill(NamedTuple):
    """The slice that computes a part of a prompt."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is of no use here
    """The prompt's index in `Workload.prefilling`."""
    tokens: int
    """The largest number of tokens to compute."""


class Decode(NamedTuple):
    """The slice that computes one step of a batch."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    """The batch's index in `Workload.decoding`."""
    computed: bool = True
    """False if the step had no forward, because it only read a token before a round of drafts."""


class Encode(NamedTuple):
    """The slice that computes one piece of the picture which has waited longest."""

    def __bool__(self) -> bool:
        """True, as for every slice; an empty tuple would be False."""
        return True


Slice = Begin | Prefill | Encode | Decode


class StepLimit(NamedTuple):
    """The limits of one step. A round of drafts must keep `seconds` or `drafts`; one of them is enough."""

    seconds: float = inf
    """The longest time of a round."""
    drafts: int = 0
    """The most drafts of a round, over all answers of the batch."""
    ahead: bool = True
    """True if a step that must first draw its tokens may dispatch the next forward before it reads them. On a CPU this
    delays the tokens by a forward, because a CPU computes while it dispatches."""


UNLIMITED = StepLimit()


class Workload(NamedTuple):
    """The work from which the next slice is chosen."""

    startable: int = 0
    """The number of requests that can begin now, by `--parallel` and by memory."""
    prefilling: Sequence[int] = ()
    """The number of tokens left to prefill in each prompt, in the order of arrival; each is positive."""
    decoding: Sequence[int] = ()
    """The ids of the batches that can step. The id of a batch never changes."""
    encoding: int = 0
    """The number of prompts that wait for a picture which can be encoded now."""
    joining: Sequence[int] = ()
    """The ids of the batches that may join another batch; at least those before their first step."""


@dataclass(slots=True)
class _Pace:
    """The latest step of a batch, and the average time of its steps."""

    slice: int
    """The number of the slice that was the batch's latest step; 0 before the first step."""
    end_s: float
    """The time at which the latest step ended, or at which the batch began, on the policy's own clock."""
    step_s: float
    """The average time of the steps that had a forward; a longer step replaces it. 0 before the first step."""


class SlicePolicy:
    """Chooses the next slice, and learns from the times of past slices. Only `took` changes the policy. The policy's
    clock is the sum of all slices so far. Owner: the engine thread."""

    def __init__(self, chunk_tokens: int, max_gap_s: float) -> None:
        """`chunk_tokens` is the largest slice of a prompt; while nothing decodes, all slices have this size."""
        self.chunk_tokens = chunk_tokens
        self.max_gap_s = max_gap_s
        self._now_s = 0.0
        self._slices = 0
        self._last_other = 0  # the number of the latest slice that was not a step
        self._paces: dict[int, _Pace] = {}
        self._known_s = 0.0  # the time of known tokens since the last step: they count as no slice
        self._begin_s = 0.0
        self._encode_s = 0.0
        self._encoded_last = False  # True if a picture came after the latest prompt slice: they take turns
        self._token_s: float | None = None
        self._most_tokens = _FIRST_TOKENS  # at most doubles with each slice, as first measurements are rough
        self._balance_s = 0.0  # the time that oldest prompts got, less the time of shortest prompts
        self._prompt_s = 0.0  # the seconds of the latest slice of a prompt or a picture
        self._beginnings_s = 0.0  # of beginnings and first steps since that slice, while prompts waited

    def next(self, work: Workload) -> Slice | None:
        """Returns the next slice. None if there is no work."""
        if len(work.decoding) == 1 and not (work.startable or work.prefilling or work.encoding):
            return Decode(0)
        beginning = Begin() if work.startable and not self._owes_prompts(work) else None
        other = beginning or (Encode() if self._encodes(work) else None)
        if not work.decoding:
            return other or (self._next_prefill(work, self.chunk_tokens) if work.prefilling else None)
        step = Decode(min(range(len(work.decoding)), key=lambda index: self._last_slice(work.decoding[index])))
        # The first step of a batch waits for short prompts, and only if their answers can join it.
        is_first = self._last_slice(work.decoding[step.index]) == 0
        if is_first and work.decoding[step.index] not in work.joining:
            return step
        room_s = self._room_s(work.decoding)
        # No other slice ran since the last step, so the room cannot become larger.
        fresh = self._last_slice(work.decoding[step.index]) > self._last_other
        if other:  # prompts wait meanwhile: their slices would use up the room
            return other if fresh or (self._begin_s if beginning else self._encode_s) <= room_s else step
        if not work.prefilling:
            return step
        tokens = self._tokens_in(room_s)
        prefill = self._next_prefill(work, max(tokens, LEAST_SLICE_TOKENS) if fresh else tokens)
        worth = not is_first and tokens >= LEAST_SLICE_TOKENS and room_s >= self.max_gap_s * _WORTH
        return prefill if fresh or worth or tokens >= work.prefilling[prefill.index] else step

    def step_limit(self, work: Workload, index: int) -> StepLimit:
        """Returns the limit of a step of the batch at `index`, or of a batch that it joins. The gap is divided among
        the batches and the waiting prompts, less the time that other slices have used. If no prompt waits, a round may
        carry LEAST_SLICE_TOKENS drafts even beyond its share; otherwise such drafts would lengthen the gap."""
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
        """Returns True if two steps fit into `share_s`, and into what the batch that waited longest has left of the
        gap."""
        paces = [self._pace(batch) for batch in decoding]
        waited_s = self._now_s - min(pace.end_s for pace in paces)
        return 0 < 2 * max(pace.step_s for pace in paces) <= min(share_s, self.max_gap_s - waited_s)

    def took(self, slice: Slice, work: Workload, seconds: float) -> None:  # noqa: A002 - the policy's word for it
        """Learns the time of a slice that `next` returned for `work`. `slice` is the slice as computed: with
        `tokens=computed` if a prefill computed fewer tokens, and with the index of the batch that stepped. A failed
        slice may be left out."""
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
        """Adds the time of a beginning or a first step, if prompts or pictures wait."""
        self._beginnings_s = self._beginnings_s + seconds if work.prefilling or work.encoding else 0.0

    def _stepped(self, batch: int, seconds: float | None) -> None:
        """Updates the pace of a batch. A longer step counts in full immediately, because rounds of drafts take longer
        than the steps between them."""
        step_s = self._paces[batch].step_s
        if seconds is not None:
            step_s = max(seconds, step_s + (seconds - step_s) * _WEIGHT)
        self._paces[batch] = _Pace(self._slices, self._now_s, step_s)

    def _measure(self, tokens: int, seconds: float) -> None:
        """Updates the cost of a token, which grows with the context: a higher cost counts in full. Short slices count
        little."""
        self._most_tokens = max(self._most_tokens, 2 * tokens)
        token_s = seconds / tokens
        if self._token_s is None:
            self._token_s = token_s
        weight = min(1.0, tokens / _FIRST_TOKENS) * (1.0 if token_s > self._token_s else _WEIGHT)
        self._token_s += (token_s - self._token_s) * weight

    def _owes_prompts(self, work: Workload) -> bool:
        """Returns True if beginnings and first steps used up their time since the latest slice of a prompt or
        picture."""
        return bool(work.prefilling or work.encoding) and self._beginnings_s > self._prompt_s

    def _encodes(self, work: Workload) -> bool:
        """Returns True if the next slice is for a picture rather than for a prompt."""
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
        """Returns the number of prompt tokens that can be computed in `room_s`."""
        if room_s <= 0:
            return 0
        token_s = self._token_s or 0.0
        tokens = int(room_s / token_s) if token_s * self.chunk_tokens > room_s else self.chunk_tokens
        tokens = min(tokens, self._most_tokens)
        return tokens - tokens % _STEP_TOKENS if tokens > LEAST_SLICE_TOKENS else tokens

    def _next_prefill(self, work: Workload, tokens: int) -> Prefill:
        """Returns a slice of the oldest or of the shortest prompt. Over time both get equal shares."""
        index = _shortest(work.prefilling) if self._balance_s >= 0 else 0
        return Prefill(index, min(tokens, work.prefilling[index], self.chunk_tokens))


def _shortest(prefilling: Sequence[int]) -> int:
    return min(range(len(prefilling)), key=prefilling.__getitem__)
