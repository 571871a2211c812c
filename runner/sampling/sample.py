"""What was drawn for the rows of one forward, and what was asked about it."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import mlx.core as mx


class Choice(NamedTuple):
    """What the host reads of one row."""

    token: int
    logprob: float | None = None
    """Of the token, where it was asked for."""
    top: Sequence[tuple[int, float]] = ()
    """Ids and log-probabilities, the most probable first."""
    forced: Sequence[int] = ()
    """The tokens behind it, where its grammar leaves only these."""


class Details(NamedTuple):
    """Log-probabilities of some rows. Nothing is evaluated."""

    logprob: mx.array
    """Of the tokens, float32 [A]"""
    top_ids: mx.array | None = None
    """uint32 [A, K], the most probable token first; None if no row asks for alternatives"""
    top_logprobs: mx.array | None = None
    """float32 [A, K]"""

    def arrays(self) -> list[mx.array]:
        """All there is to evaluate."""
        return [array for array in self if array is not None]

    def read(self) -> list[tuple[float, list[tuple[int, float]]]]:
        """The log-probability and the alternatives of each row. Waits for the device."""
        logprobs = cast("list[float]", self.logprob.tolist())
        if self.top_ids is None or self.top_logprobs is None:
            return [(logprob, []) for logprob in logprobs]
        ids = cast("list[list[int]]", self.top_ids.tolist())
        values = cast("list[list[float]]", self.top_logprobs.tolist())
        return [(logprob, [*zip(*top, strict=True)]) for logprob, *top in zip(logprobs, ids, values, strict=True)]


class Wish(NamedTuple):
    """Where the details of a row stand, and how many alternatives it asked for."""

    details: Details
    row: int
    top: int


class Sample:
    """The next tokens of B rows and what was asked about them. Nothing is evaluated; pass `arrays()` to async_eval."""

    __slots__ = ("_wishes", "token")

    def __init__(self, token: mx.array, wishes: "Sequence[Wish | None]" = ()) -> None:
        """`token`: uint32 [B]. `wishes`: of each row; none at all if no row asks for log-probabilities."""
        self.token = token
        self._wishes = wishes

    @staticmethod
    def joined(samples: "Sequence[Sample]") -> "Sample":
        """All their rows one after the other (lazy)."""
        if len(samples) == 1:
            return samples[0]
        wishes = [wish for sample in samples for wish in sample._wishes or (None,) * sample.token.size]
        return Sample(mx.concatenate([sample.token for sample in samples]), wishes)

    def take(self, rows: Sequence[int]) -> "Sample":
        """Those rows, in this order (lazy). The details stay in one piece and are shared."""
        return Sample(
            self.token[mx.array([*rows], dtype=mx.uint32)], [self._wishes[row] for row in rows] if self._wishes else ()
        )

    def arrays(self) -> list[mx.array]:
        """All there is to evaluate.

        The state of the samplers is not among it: each token depends on the state before it, so the evaluation of a
        token brings the state of all rows that were drawn with it up to it, and one step is all that is ever pending.
        """
        if not self._wishes:
            return [self.token]
        return [self.token, *(array for details in self._details() for array in details.arrays())]

    def read(self) -> list[Choice]:
        """What each row drew, in order. Waits for the device; each array is read once."""
        tokens = cast("list[int]", self.token.tolist())
        if not self._wishes:
            return [Choice(token) for token in tokens]
        read = {id(details): details.read() for details in self._details()}
        choices = []
        for token, wish in zip(tokens, self._wishes, strict=True):
            if wish is None:
                choices.append(Choice(token))
            else:
                logprob, top = read[id(wish.details)][wish.row]
                choices.append(Choice(token, logprob, top[: wish.top]))
        return choices

    def _details(self) -> list[Details]:
        return list({id(wish.details): wish.details for wish in self._wishes if wish is not None}.values())
