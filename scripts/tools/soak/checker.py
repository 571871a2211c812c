"""The right answer to any request: that of a runner of the same model that has no cache."""

import asyncio
import contextlib
from collections import OrderedDict
from itertools import zip_longest

from scripts.tools.host.lib import Client, Completion, Logprob, Request

TOLERANCE = 2e-3
"""By how much logprobs may differ: another order of the same float32 sums makes about 1e-5."""
TIE = "tie"
LONGEST_WAIT_S = 120.0
"""An answer that takes longer counts as a hang."""
_KEPT = 2000
_WAITING = 24
_DRAWING = {"temperature", "repeat_penalty"}


class Checker:
    """Compares answers with those of a runner without a cache, while the clients go on.

    That runner is slower: an answer that is offered while many others wait is not checked. `wrong` holds one text for
    each answer that was not the right one; `ties` counts those that leave the right one at a token where two were
    equally likely. If answers are `exact`, there are no ties, and log-probabilities are equal to the last bit.
    """

    def __init__(self, reference: Client, *, exact: bool = False) -> None:
        self.checked = self.ties = 0
        self._tolerance = -1.0 if exact else TOLERANCE
        self.wrong: list[str] = []
        self._reference = reference
        self._known: OrderedDict[str, Completion] = OrderedDict()
        self._waiting: asyncio.Queue[tuple[Request, Completion]] = asyncio.Queue(_WAITING)

    def offer(self, request: Request, completion: Completion) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            self._waiting.put_nowait((request, completion))

    async def run(self) -> None:
        while True:
            request, completion = await self._waiting.get()
            try:
                async with asyncio.timeout(LONGEST_WAIT_S):
                    fault = await self._judge(request, completion)
            except Exception as error:  # a finding too, and the others are still to be checked
                fault = f"not judged: {type(error).__name__}: {error}"
            self.checked += 1
            if fault == TIE:
                self.ties += 1
            elif fault:
                self.wrong.append(f"{fault} ({len(request.prompt)} characters of prompt, {request.options})")
            self._waiting.task_done()

    async def finish(self) -> None:
        """Waits until all that was offered is checked, or for so long as one answer may take."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._waiting.join(), LONGEST_WAIT_S)

    async def tokenize(self, text: str) -> list[int]:
        return await self._reference.tokenize(text)

    async def _judge(self, request: Request, completion: Completion) -> str:
        expected = await self._expected(request)
        if request.logprobs:
            drawn = bool(_DRAWING & (request.options or {}).keys())
            return difference(completion, expected, self._tolerance, drawn=drawn)
        if completion.text == expected.text:
            return _figures(completion, expected)
        told = await self._expected(Request(request.prompt, request.options, logprobs=True, top_logprobs=2))
        agreed = len(_common_prefix(completion.text, told.text))
        position = 0
        for entry in _entries(told):
            position += len(entry.token)
            if position > agreed:
                return TIE if _is_tie(entry, self._tolerance) else f"{completion.text!r} instead of {expected.text!r}"
        return f"{completion.text!r} instead of {expected.text!r}"

    async def _expected(self, request: Request) -> Completion:
        key = repr(request)
        if key not in self._known:
            self._known[key] = await self._reference.complete(request)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


def difference(actual: Completion, expected: Completion, tolerance: float, *, drawn: bool) -> str:
    """Returns the fault of an answer: none (""), `TIE`, or a text. Both come with logprobs and the two best, which may
    differ by the `tolerance`; if that is negative, by nothing.

    `drawn`: not the most likely tokens; then a tie cannot be told from tokens drawn apart, so their number has to have
    a bound.
    """
    for number, (ours, theirs) in enumerate(zip_longest(_entries(actual), _entries(expected))):
        if ours is None or theirs is None:
            return f"{len(_entries(actual))} tokens instead of {len(_entries(expected))}"
        if ours.token != theirs.token:
            where = f"token {number}: {ours.token!r} instead of {theirs.token!r}"
            return TIE if _is_tie(theirs, tolerance) or (drawn and tolerance >= 0) else where
        if abs(ours.logprob - theirs.logprob) > max(tolerance, 0):
            return f"token {number}, {ours.token!r}: logprob {ours.logprob:.6f} instead of {theirs.logprob:.6f}"
    if actual.text != expected.text:
        return f"{actual.text!r} instead of {expected.text!r}"
    return _figures(actual, expected)


def _figures(actual: Completion, expected: Completion) -> str:
    ours, theirs = (
        (answer.final.done_reason, answer.final.eval_count, answer.final.prompt_eval_count)
        for answer in (actual, expected)
    )
    return "" if ours == theirs else f"reason and counts {ours} instead of {theirs}"


def _entries(completion: Completion) -> list[Logprob]:
    return [entry for answer in completion.answers for entry in answer.logprobs or ()]


def _is_tie(entry: Logprob, tolerance: float) -> bool:
    return len(entry.top) > 1 and entry.top[0].logprob - entry.top[1].logprob <= tolerance


def _common_prefix(one: str, other: str) -> str:
    for length, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return one[:length]
    return min(one, other, key=len)
