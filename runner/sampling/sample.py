"""The tokens drawn for the rows of one forward, and their log-probabilities."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple, cast

import mlx.core as mx


class Choice(NamedTuple):
    """The next token of one row, as read from the device."""

    token: int
    logprob: float | None = None
    """Of the token; None if the request does not want it."""
    top: Sequence[tuple[int, float]] = ()
    """Ids and log-probabilities, the most probable first."""
    forced: Sequence[int] = ()
    """The tokens that the grammar forces after it."""
    following: "Sequence[Choice]" = ()
    """The choices behind it: those of the drafts that proved right, and the first one that was not drafted."""

    @property
    def tokens(self) -> list[int]:
        """All tokens, in order."""
        return [token for each in (self, *self.following) for token in (each.token, *each.forced)]


class Details(NamedTuple):
    """Log-probabilities of some rows (lazy)."""

    logprob: mx.array
    """Of the tokens, float32 [A]"""
    top_ids: mx.array | None = None
    """uint32 [A, K], the most probable token first; None if no row wants alternatives"""
    top_logprobs: mx.array | None = None
    """float32 [A, K]; -inf for tokens that the grammar forbids"""

    def arrays(self) -> list[mx.array]:
        """Returns the arrays to evaluate."""
        return [array for array in self if array is not None]

    def read(self) -> list[tuple[float, list[tuple[int, float]]]]:
        """Returns the log-probability and the alternatives of each row, without forbidden tokens. Waits for the
        device."""
        logprobs = cast("list[float]", self.logprob.tolist())
        if self.top_ids is None or self.top_logprobs is None:
            return [(logprob, []) for logprob in logprobs]
        ids = cast("list[list[int]]", self.top_ids.tolist())
        values = cast("list[list[float]]", self.top_logprobs.tolist())
        return [
            (logprob, [each for each in zip(*top, strict=True) if each[1] > -inf])
            for logprob, *top in zip(logprobs, ids, values, strict=True)
        ]


class Wish(NamedTuple):
    """The place of a row in the details, and the number of alternatives that it wants."""

    details: Details
    row: int
    top: int


class Sample:
    """The next tokens of B rows, with the log-probabilities that the rows want. Lazy: pass `arrays()` to async_eval."""

    __slots__ = ("_wishes", "token")

    def __init__(self, token: mx.array, wishes: "Sequence[Wish | None]" = ()) -> None:
        """`token`: uint32 [B]. `wishes`: one of each row; empty if no row wants log-probabilities."""
        self.token = token
        self._wishes = wishes

    @staticmethod
    def joined(samples: "Sequence[Sample]") -> "Sample":
        """Returns the rows of all samples, one after the other (lazy)."""
        if len(samples) == 1:
            return samples[0]
        wishes = [wish for sample in samples for wish in sample._wishes or (None,) * sample.token.size]
        return Sample(mx.concatenate([sample.token for sample in samples]), wishes)

    def take(self, rows: Sequence[int]) -> "Sample":
        """Returns these rows, in this order (lazy). The details are shared and not copied."""
        return Sample(
            self.token[mx.array([*rows], dtype=mx.uint32)], [self._wishes[row] for row in rows] if self._wishes else ()
        )

    def arrays(self) -> list[mx.array]:
        """Returns the arrays to evaluate.

        They do not include the state of the samplers. A token depends on the state before it, so evaluating the token
        also evaluates that state, of all rows drawn with it: never more than one step of it is pending.
        """
        if not self._wishes:
            return [self.token]
        return [self.token, *(array for details in self._details() for array in details.arrays())]

    def read(self) -> list[Choice]:
        """Returns the choice of each row, in order. Waits for the device; reads each array once."""
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
