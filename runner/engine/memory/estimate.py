"""How much memory a slice of a prompt takes beside what it leaves, learned from those that were."""

from math import ceil, floor
from typing import NamedTuple

from runner.engine.policy import LEAST_TOKENS

_FIRST_TOKEN_BYTES = 1 << 20  # more than a token takes in most models, for the very first slice


class _Seen(NamedTuple):
    """The most of a few slices over contexts of about one length."""

    context: int
    token_bytes: float


class WorkspaceEstimate:
    """Knows the most that a token took, by the length of the context before it. Owner: the engine thread.

    A token's own activations are the same everywhere, and its attention grows in proportion to the context: so the cost
    of a token is no less with a longer context, and grows along a line. Lengths between two powers of two are one.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def saw(self, tokens: int, context: int, nbytes: int) -> None:
        """A slice over `tokens`, after which the context had `context` of them, took so many bytes for a while."""
        token_bytes = nbytes / max(tokens, LEAST_TOKENS)
        before = self._seen.get(context.bit_length(), _Seen(0, 0.0))
        self._seen[context.bit_length()] = _Seen(max(before.context, context), max(before.token_bytes, token_bytes))

    def of(self, tokens: int, context: int) -> int:
        """About what a slice over so many tokens will take in a context of `context`; 0 before anything was seen."""
        return ceil(max(tokens, LEAST_TOKENS) * self._token_bytes(context))

    def surely(self, tokens: int, context: int) -> int:
        """What such a slice will take at least: of a context longer than any so far it takes no line for sure."""
        known = [each.token_bytes for each in self._seen.values() if each.context <= context]
        return ceil(max(tokens, LEAST_TOKENS) * max(known, default=0.0))

    def tokens_in(self, nbytes: int, context: int) -> int:
        """How many tokens a slice may have that takes so many bytes."""
        token_bytes = max(1.0, self._token_bytes(context)) if self._seen else _FIRST_TOKEN_BYTES
        return max(LEAST_TOKENS, floor(nbytes / token_bytes))

    def _token_bytes(self, context: int) -> float:
        seen = sorted(self._seen.values())
        shorter = [each for each in seen if each.context <= context]
        least = max((each.token_bytes for each in shorter), default=0.0)
        if shorter and shorter[-1].context == context:
            return least
        if len(shorter) < len(seen):
            return max(least, seen[len(shorter)].token_bytes)
        if not shorter:
            return 0.0
        first, last = shorter[0], shorter[-1]
        if first is last:
            return last.token_bytes * context / last.context
        slope = (last.token_bytes - first.token_bytes) / (last.context - first.context)
        return max(least, last.token_bytes + max(0.0, slope) * (context - last.context))
