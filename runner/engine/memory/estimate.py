"""Estimates the memory that a slice of a prompt takes beside what it leaves, from the slices so far."""

from math import ceil, floor
from typing import NamedTuple

from runner.engine.policy import LEAST_TOKENS

_FIRST_TOKEN_BYTES = 1 << 20  # for the very first slice: more than a token takes in most models


class _Sample(NamedTuple):
    """The maximum over some slices whose contexts were about equally long."""

    context: int
    token_bytes: float


class WorkspaceEstimate:
    """The most that a token took, by the length of the context before it. Owner: the engine thread.

    A token's own activations cost the same everywhere, and its attention grows in proportion to the context. So the
    cost of a token never falls as the context grows, and rises along a line. Lengths between two powers of two count as
    one.
    """

    def __init__(self) -> None:
        self._samples: dict[int, _Sample] = {}

    def add(self, tokens: int, context: int, nbytes: int) -> None:
        """Learns from a slice over `tokens` that left a context of `context` tokens, and took `nbytes` meanwhile."""
        token_bytes = nbytes / max(tokens, LEAST_TOKENS)
        before = self._samples.get(context.bit_length(), _Sample(0, 0.0))
        self._samples[context.bit_length()] = _Sample(
            max(before.context, context), max(before.token_bytes, token_bytes)
        )

    def likely_bytes(self, tokens: int, context: int) -> int:
        """Returns about what a slice over so many tokens will take in a context of `context`; 0 before the first."""
        return ceil(max(tokens, LEAST_TOKENS) * self._token_bytes(context))

    def certain_bytes(self, tokens: int, context: int) -> int:
        """Returns what such a slice will take at least. Does not extrapolate to contexts longer than any so far."""
        known = [each.token_bytes for each in self._samples.values() if each.context <= context]
        return ceil(max(tokens, LEAST_TOKENS) * max(known, default=0.0))

    def tokens_in(self, nbytes: int, context: int) -> int:
        """Returns the number of tokens in a slice that takes so many bytes, and at least LEAST_TOKENS."""
        token_bytes = max(1.0, self._token_bytes(context)) if self._samples else _FIRST_TOKEN_BYTES
        return max(LEAST_TOKENS, floor(nbytes / token_bytes))

    def _token_bytes(self, context: int) -> float:
        samples = sorted(self._samples.values())
        shorter = [each for each in samples if each.context <= context]
        least = max((each.token_bytes for each in shorter), default=0.0)
        if shorter and shorter[-1].context == context:
            return least
        if len(shorter) < len(samples):
            return max(least, samples[len(shorter)].token_bytes)
        if not shorter:
            return 0.0
        first, last = shorter[0], shorter[-1]
        if first is last:
            return last.token_bytes * context / last.context
        slope = (last.token_bytes - first.token_bytes) / (last.context - first.context)
        return max(least, last.token_bytes + max(0.0, slope) * (context - last.context))
