"""Follows one answer through its grammar with llguidance."""

from collections import deque
from collections.abc import Callable, Sequence
from time import process_time

from llguidance import LLMatcher

from runner.errors import RequestError
from runner.grammar.explain_error import panics_as_errors
from runner.grammar.messages import Follow, State
from runner.grammar.number_bounds import NumberBounds

_TRY_S = 0.003
_REASONS = {
    "NoExtensionBias": "no tokens of the model spell the text that must come next",
    "ParserTooComplex": "it is too ambiguous; let its alternatives begin differently",
    "LexerTooComplex": "its texts are too complex; make patterns and length limits simpler",
}
"""llguidance's name for a failure -> the explanation, with advice where some helps."""


class GrammarMatcher:
    """Follows one answer through its grammar, token by token.

    Where the grammar allows only one text, that text is forced, in the tokens that the tokenizer makes of it. So an
    answer has the same tokens whether it is computed alone or in a batch.
    """

    def __init__(self, matcher: LLMatcher, bounds: NumberBounds | None) -> None:
        """`matcher` must be at its beginning. The caller must not use `matcher` or `bounds` any more."""
        self._matcher = matcher
        self._bounds = bounds

    def copy(self) -> "GrammarMatcher":
        """Returns an independent copy at the same position."""
        return GrammarMatcher(self._matcher.deep_copy(), self._bounds.copy() if self._bounds else None)

    def begin(self) -> State:
        """Returns the state at the beginning of an answer."""
        return self._state(self._look_ahead)

    def follow(self, step: Follow) -> State:
        """Returns the state after the tokens of `step`. If `step.tries`, the state has only `tried`."""
        if step.tries:
            return State(tried=self._try(step.tokens))
        return self._state(lambda: self._restart(step.tokens) if step.restart else self._take(deque(), step.tokens))

    def _state(self, go: Callable[[], deque[int]]) -> State:
        forced: deque[int] = deque()
        try:
            with panics_as_errors():
                forced = go()
                if self._matcher.is_stopped() and not self._matcher.is_error():
                    return State([*forced], complete=True)
                mask = self._mask()
            self._refuse_errors()
        except RequestError as error:
            return State([*forced], error=str(error))
        return State([*forced], mask)

    def _try(self, tokens: Sequence[int]) -> list[bytes | int]:
        """Returns the mask, or the forced token, after each of `tokens`; the list ends early if this takes too long.
        The position of this matcher does not change."""
        until_s = process_time() + _TRY_S
        tried, forced = list[bytes | int](), deque[int]()
        try:
            with panics_as_errors():
                ahead = self.copy()
                for token in tokens:
                    forced = ahead._take(forced, [token])
                    if (not forced and ahead._matcher.is_stopped()) or process_time() > until_s:
                        break
                    mask = forced[0] if forced else ahead._mask()
                    ahead._refuse_errors()
                    tried.append(mask)
        except (RequestError, MemoryError, RecursionError):
            pass  # the grammar forbids this token, or the token takes too much time or memory
        return tried

    def _restart(self, tokens: Sequence[int]) -> deque[int]:
        self._matcher.reset()
        if self._bounds:
            self._bounds.reset()
        return self._take(self._look_ahead(), tokens)

    def _take(self, forced: deque[int], tokens: Sequence[int]) -> deque[int]:
        """Advances by `tokens`, which must begin with `forced`. Returns the forced tokens that come next."""
        for token in tokens:
            if not forced:
                self._consume([token])
                forced = self._look_ahead()
            elif forced.popleft() != token:
                raise RequestError(f"the grammar does not allow token {token}")
        return forced

    def _look_ahead(self) -> deque[int]:
        """Advances the matcher to the next choice. Returns the forced tokens before that choice."""
        self._refuse_errors()
        forced = self._matcher.compute_ff_tokens()
        self._consume(forced)
        self._refuse_errors()
        return deque(forced)

    def _consume(self, tokens: list[int]) -> None:
        self._matcher.consume_tokens(tokens)
        if self._bounds:
            self._bounds.consume(tokens)

    def _mask(self) -> bytes:
        mask: bytes = self._matcher.compute_bitmask()
        return self._bounds.narrowed(mask) if self._bounds else mask

    def _refuse_errors(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            raise RequestError(f"the answer cannot follow its grammar: {_REASONS.get(reason, reason)}")
