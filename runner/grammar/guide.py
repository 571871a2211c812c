"""Where an answer stands in its grammar."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runner.errors import RequestError
from runner.grammar.panics import told_as_errors

if TYPE_CHECKING:
    from llguidance import LLMatcher


_REASONS = {
    "NoExtensionBias": "the model's vocabulary cannot spell what has to come next",
    "ParserTooComplex": "it is too ambiguous; give its parts other beginnings",
    "LexerTooComplex": "its texts are too complex; make patterns and length limits simpler",
}
"""What llguidance calls it, and what to do."""


class Guide:
    """Leads one answer through its grammar: what has to come next, what may, and whether anything does.

    What the grammar leaves no choice about is spelled in the tokens that the tokenizer would make of it, whoever
    computes the answer and together with whom. Owner: the engine thread.
    """

    def __init__(self, matcher: "LLMatcher", size: int) -> None:
        """`matcher` stands at the beginning and is nobody else's; `size` is that of the vocabulary."""
        self._matcher = matcher
        self._size = size
        self._forced: deque[int] = deque()  # the matcher is behind them already
        self._mask: bytes | None = None
        self._look_ahead()

    @property
    def complete(self) -> bool:
        """Whether nothing more may come."""
        return not self._forced and self._matcher.is_stopped()

    def take(self, token: int) -> None:
        """The answer goes on with this token, which may not be one that ends it. RequestError if it cannot."""
        self._mask = None
        if not self._forced:
            with told_as_errors():
                self._matcher.consume_token(token)
            self._look_ahead()
        elif self._forced.popleft() != token:
            raise RequestError(f"the grammar has no place for token {token}")

    def forced(self, most: int) -> list[int]:
        """Goes on with what has to come next, at most so many tokens, and returns them."""
        tokens = [self._forced.popleft() for _ in range(min(most, len(self._forced)))]
        if tokens:
            self._mask = None
        return tokens

    def mask(self) -> bytes:
        """A bit for each token that may come next, those that end the answer included.

        Raises:
            RequestError: there is none in this vocabulary, or the grammar takes too long to follow.
        """
        if self._mask is None:
            with told_as_errors():
                self._mask = self._bit(self._forced[0]) if self._forced else self._matcher.compute_bitmask()
            self._refuse_errors()
        return self._mask

    def restart(self, tokens: Sequence[int]) -> None:
        """Back to the beginning, and from there along `tokens`."""
        self._forced.clear()
        self._mask = None
        self._matcher.reset()
        self._look_ahead()
        for token in tokens:
            self.take(token)

    def _look_ahead(self) -> None:
        """Takes the matcher on to the next choice."""
        self._refuse_errors()
        with told_as_errors():
            self._forced.extend(self._matcher.compute_ff_tokens())
            self._matcher.consume_tokens(list(self._forced))
        self._refuse_errors()

    def _refuse_errors(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            raise RequestError(f"the answer cannot follow its grammar: {_REASONS.get(reason, reason)}")

    def _bit(self, token: int) -> bytes:
        mask = bytearray(-(-self._size // 8))
        mask[token // 8] = 1 << token % 8
        return bytes(mask)
