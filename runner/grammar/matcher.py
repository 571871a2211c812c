"""Follows one answer through its grammar with llguidance."""

from collections import deque
from collections.abc import Callable, Sequence
from time import process_time
from typing import TYPE_CHECKING

from runner.errors import RequestError
from runner.grammar.messages import Follow, State
from runner.grammar.panics import panics_as_errors

if TYPE_CHECKING:
    from llguidance import LLMatcher

_TRY_S = 0.003
_REASONS = {
    "NoExtensionBias": "the model's vocabulary cannot spell what must come next",
    "ParserTooComplex": "it is too ambiguous; let its alternatives begin differently",
    "LexerTooComplex": "its texts are too complex; make patterns and length limits simpler",
}
"""llguidance's name for a failure -> the explanation, with advice where there is any."""


class GrammarMatcher:
    """Advances one answer through its grammar, token by token.

    Where the grammar leaves no choice, the forced text comes in the tokens that the tokenizer would make of it. So an
    answer has the same tokens whether it is computed alone or in a batch.
    """

    def __init__(self, matcher: "LLMatcher", try_s: float | None = None) -> None:
        """Takes over `matcher`, which is at its beginning and not shared. What is only tried may take `try_s` of
        processor time; None: a moment."""
        self._matcher, self._try_s = matcher, try_s

    def begin(self) -> State:
        """Returns the state at the beginning of an answer."""
        return self._state(lambda: self._look_ahead())

    def follow(self, step: Follow) -> State:
        """Returns the state after the tokens of `step`, or what would be behind them."""
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
                mask = self._matcher.compute_bitmask()
            self._refuse_errors()
        except RequestError as error:
            return State([*forced], error=str(error))
        return State([*forced], mask)

    def _try(self, tokens: Sequence[int]) -> list[bytes | int]:
        """Returns what may come behind each of these tokens, as far as that is found in a moment. The matcher stays."""
        until_s = process_time() + (_TRY_S if self._try_s is None else self._try_s)
        ahead, tried = GrammarMatcher(self._matcher.deep_copy()), list[bytes | int]()
        forced: deque[int] = deque()
        try:
            with panics_as_errors():
                for token in tokens:
                    forced = ahead._take(forced, [token])
                    if (not forced and ahead._matcher.is_stopped()) or process_time() > until_s:
                        break
                    mask = forced[0] if forced else ahead._matcher.compute_bitmask()
                    ahead._refuse_errors()
                    tried.append(mask)
        except (RequestError, MemoryError, RecursionError):
            pass  # it may not come, or is not worth the trouble
        return tried

    def _restart(self, tokens: Sequence[int]) -> deque[int]:
        self._matcher.reset()
        return self._take(self._look_ahead(), tokens)

    def _take(self, forced: deque[int], tokens: Sequence[int]) -> deque[int]:
        """Continues with `tokens`, which must begin with `forced`. Returns the tokens that are forced after them."""
        for token in tokens:
            if not forced:
                self._matcher.consume_token(token)
                forced = self._look_ahead()
            elif forced.popleft() != token:
                raise RequestError(f"the grammar does not allow token {token}")
        return forced

    def _look_ahead(self) -> deque[int]:
        """Advances the matcher to the next choice. Returns the tokens that lead there."""
        self._refuse_errors()
        forced = self._matcher.compute_ff_tokens()
        self._matcher.consume_tokens(forced)
        self._refuse_errors()
        return deque(forced)

    def _refuse_errors(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            raise RequestError(f"the answer cannot follow its grammar: {_REASONS.get(reason, reason)}")
