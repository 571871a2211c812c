"""The tokens drawn for the rows of one forward, and their log-probabilities."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple, cast

import mlx.core as mx

from runner.sampling.filters import Mask, masked, sort_keys


class Choice(NamedTuple):
    """The next token of one row, as read from the device."""

    token: int
    logprob: float | None = None
    """The log-probability of the token; None if the request does not want log-probabilities."""
    top: Sequence[tuple[int, float]] = ()
    """The ids and log-probabilities of alternatives, the most probable first."""
    forced: Sequence[int] = ()
    """The tokens that the grammar forces after this token."""
    following: "Sequence[Choice]" = ()
    """The choices after this one: the right drafts, and the first token that was not drafted."""
    from_numbers: bool = True
    """False if NaN or infinity was among the logits: then both the token and the layers are useless."""

    @property
    def tokens(self) -> list[int]:
        """The tokens of this choice and of `following`, with forced tokens, in order."""
        return [token for each in (self, *self.following) for token in (each.token, *each.forced)]


class Details(NamedTuple):
    """The log-probabilities of A rows (lazy)."""

    logprob: mx.array
    """The log-probabilities of the chosen tokens, float32 [A]"""
    top_ids: mx.array | None = None
    """The ids of alternatives, uint32 [A, K], the most probable first; None if no row wants alternatives"""
    top_logprobs: mx.array | None = None
    """The log-probabilities of the alternatives, float32 [A, K]; -inf for tokens that the grammar forbids"""

    def read_rows(self) -> list[tuple[float, list[tuple[int, float]]]]:
        """Returns each row's log-probability and alternatives, without forbidden tokens. Waits for the device."""
        logprobs = cast("list[float]", self.logprob.tolist())
        if self.top_ids is None or self.top_logprobs is None:
            return [(logprob, []) for logprob in logprobs]
        ids = cast("list[list[int]]", self.top_ids.tolist())
        values = cast("list[list[float]]", self.top_logprobs.tolist())
        return [
            (logprob, [each for each in zip(*top, strict=True) if each[1] > -inf])
            for logprob, *top in zip(logprobs, ids, values, strict=True)
        ]


class LogprobsRow(NamedTuple):
    """The log-probabilities of one row: `details`, the index of the row in them, and the number of alternatives to
    return."""

    details: Details
    row: int
    top: int


FLOOR = -9999.0
"""The lowest log-probability for clients: JSON has no -Infinity."""
_NO_TOKEN = 0xFFFFFFFF
"""The value that `read` finds in place of a token that is not from numbers."""
_NO_CHOICE = Choice(0, from_numbers=False)


class SampledTokens:
    """The next tokens of B rows, with the log-probabilities that the rows want. Lazy: pass `arrays()` to async_eval."""

    __slots__ = ("_logprobs", "_read", "token")

    def __init__(
        self,
        token: mx.array,
        logprobs: Sequence[LogprobsRow | None] = (),
        logits: mx.array | None = None,
        scores: mx.array | None = None,
    ) -> None:
        """`token`: uint32 [B]. `logprobs`: one entry for each row; empty if no row wants log-probabilities. If the
        tokens were just drawn, `logits` are the model's, float32 [B, V], and `scores` the logits with masks.

        A row is from numbers if no logit is NaN or infinity and the chosen score is not -inf; other logits may be -inf.
        A sum shows every NaN on every device; `max` and `argmax` ignore NaN on some devices. The sum takes little time
        beside the product that gives the logits.
        """
        self.token = token
        self._logprobs = logprobs
        self._read = token
        if logits is not None and scores is not None:
            chosen = mx.take_along_axis(scores, token[:, None], axis=-1)[:, 0]
            witness = mx.maximum(mx.sum(logits, axis=-1), chosen)  # finite if the row is from numbers
            self._read = mx.where(mx.abs(witness) < inf, token, mx.array(_NO_TOKEN, mx.uint32))

    @staticmethod
    def joined(samples: "Sequence[SampledTokens]") -> "SampledTokens":
        """Returns the rows of all samples, in order (lazy)."""
        if len(samples) == 1:
            return samples[0]
        logprobs = [row for sample in samples for row in sample._logprobs or (None,) * sample.token.size]
        joined = SampledTokens(mx.concatenate([sample.token for sample in samples]), logprobs)
        joined._read = mx.concatenate([sample._read for sample in samples])
        return joined

    def take(self, rows: Sequence[int]) -> "SampledTokens":
        """Returns the samples of these rows, in this order (lazy), with the same log-probabilities."""
        places = mx.array([*rows], dtype=mx.uint32)
        taken = SampledTokens(self.token[places], [self._logprobs[row] for row in rows] if self._logprobs else ())
        taken._read = self._read[places]
        return taken

    def arrays(self) -> list[mx.array]:
        """Returns the arrays to evaluate.

        The state of the samplers is not among them. A token depends on the state before it, so the evaluation of a
        token evaluates that state for all rows drawn together: at most one step of the state is pending.
        """
        if not self._logprobs:
            return [self._read]
        return [self._read, *(array for details in self._details() for array in details if array is not None)]

    def read(self) -> list[Choice]:
        """Returns the choice of each row, in order. Waits for the device; reads each array once."""
        tokens = cast("list[int]", self._read.tolist())
        choices = [Choice(token) if token != _NO_TOKEN else _NO_CHOICE for token in tokens]
        if not self._logprobs:
            return choices
        read = {id(details): details.read_rows() for details in self._details()}
        for row, wanted in enumerate(self._logprobs):
            if wanted is not None:
                logprob, top = read[id(wanted.details)][wanted.row]
                choices[row] = choices[row]._replace(logprob=logprob, top=top[: wanted.top])
        return choices

    def _details(self) -> list[Details]:
        return list({id(row.details): row.details for row in self._logprobs if row is not None}.values())


def log_probabilities(logits: mx.array) -> mx.array:
    """Returns the log-softmax, float32 [B, V], of `logits` (float32 [B, V]): FLOOR to 0 for finite logits."""
    # Subtracts the largest logit first: a float32 near 1000 has too few digits after the point.
    shifted = logits - mx.max(logits, axis=-1, keepdims=True)
    return mx.maximum(shifted - mx.logsumexp(shifted, axis=-1, keepdims=True), FLOOR)


def most_probable(log_probs: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Returns ids (uint32 [B, k]) and log-probabilities [B, k] of the k most probable tokens, most probable first. 0 <
    k <= V. Equally probable tokens are in the order of their ids, so the first is the token of greedy decoding."""
    keys = sort_keys(mx.abs(log_probs), mx.arange(log_probs.shape[-1], dtype=mx.uint64))
    if k < keys.shape[-1]:
        keys = mx.partition(keys, k - 1, axis=-1)[..., :k]
    ids = mx.sort(keys, axis=-1).astype(mx.uint32)  # the lower halves of the keys
    return ids, mx.take_along_axis(log_probs, ids, axis=-1)


def logprobs_of_candidates(logits: mx.array, token: mx.array, candidates: Sequence[int]) -> LogprobsRow:
    """Returns the log-probabilities of `token` and of the candidates, by the raw logits [1, V]. The candidates take the
    place of the most probable tokens."""
    log_probs = log_probabilities(logits)
    ids = mx.array([candidates], dtype=mx.uint32)
    values = mx.take_along_axis(log_probs, ids, axis=-1)
    return LogprobsRow(Details(_of_token(log_probs, token), ids, values), 0, len(candidates))


def logprobs_of(scores: mx.array, token: mx.array, top: int, masks: Sequence[Mask | None]) -> Details:
    """Returns the log-probabilities of `token` [A] and of the `top` most probable tokens. `scores` [A, V] are the
    logits with their masks, without penalties. Forbidden tokens have -inf."""
    log_probs = log_probabilities(scores)
    log_probs = masked(log_probs, masks) if masks else log_probs
    logprob = _of_token(log_probs, token)
    return Details(logprob, *most_probable(log_probs, top)) if top > 0 else Details(logprob)


def _of_token(log_probs: mx.array, token: mx.array) -> mx.array:
    """Returns the log-probability [B] of `token` (uint32 [B])."""
    return mx.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0]
