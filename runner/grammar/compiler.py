"""Compiles a `Format` into a grammar. Time and memory depend on the format and have no bound here."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from time import process_time
from typing import TYPE_CHECKING

from protocol.format import Format, FormatError
from runner.engine.guide import Follow, Guide, State
from runner.errors import RequestError
from runner.grammar.explain_error import explain_error, is_unsupported, panics_as_errors
from runner.grammar.format_to_lark import lark_text
from runner.grammar.rewriter import pruned, rewritten
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# --- Follows one answer through its grammar with llguidance.

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


_MOST_ITEMS = 50_000  # a row has four for each optional property that may come next


class LocalGrammar:
    """A grammar compiled in this process, for any number of answers. Immutable."""

    def __init__(self, matcher: "LLMatcher", size: int, try_s: float | None, left_out: str = "") -> None:
        self._matcher, self._try_s = matcher, try_s
        self.left_out = left_out
        """The fault of the parts of schemas that cannot be enforced and were left out; empty if all are enforced."""
        self._size = size

    def steps(self) -> GrammarMatcher:
        """Returns a matcher for one answer, at its beginning."""
        return GrammarMatcher(self._matcher.deep_copy(), self._try_s)

    def guide(self) -> Guide:
        """Returns a guide for one answer, at its beginning; its states are computed in this thread."""
        steps = self.steps()
        return Guide(_LocalSource(steps), steps.begin(), self._size)

    def release(self) -> None:
        """Does nothing: no answer has reserved anything."""


class Compiler:
    """Compiles grammars over one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, try_s: float | None = None) -> None:
        """Uses the first `vocab_size` tokens, the vocabulary of the model; 0 if that is unknown. `try_s` is as
        for `GrammarMatcher`."""
        self._tokenizer, self._try_s = tokenizer, try_s
        self._size = min(vocab_size or tokenizer.vocab_size, tokenizer.vocab_size)

    @cached_property
    def vocabulary(self) -> "LLTokenizer":
        """The tokenizer as llguidance needs it, shared by all grammars. Takes a second for 100,000 tokens."""
        from runner.grammar.vocabulary import make_vocabulary

        return make_vocabulary(self._tokenizer, self._size)

    def compile(self, wanted: Format) -> LocalGrammar:
        """Compiles `wanted`, with its schemas rewritten and without what of them cannot be enforced.

        Raises:
            RequestError: the format is invalid, or no answer in this vocabulary can begin to follow it.
        """
        with panics_as_errors():
            for form in (rewritten(wanted), wanted):  # rewriting never refuses what could be served as it is
                matcher, left_out = self._matcher(form, lenient=False), ""
                if matcher.is_error() and is_unsupported(matcher.get_error()):
                    left_out = explain_error(matcher.get_error(), form)
                    matcher = self._matcher(pruned(form), lenient=True)
                if not matcher.is_error():
                    break
            else:
                raise RequestError(f"Format: {explain_error(matcher.get_error(), wanted)}")
            matcher.compute_bitmask()  # the lexer's first states are the same for all answers
        compiled = LocalGrammar(matcher, self._size, self._try_s, left_out)
        beginning = compiled.steps().begin()
        if beginning.error and not beginning.forced:
            raise RequestError(beginning.error)
        return compiled

    def _matcher(self, wanted: Format, *, lenient: bool) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        from runner.grammar.vocabulary import special_tokens

        limits = LLParserLimits(verbose_errors=False, max_items_in_row=_MOST_ITEMS)
        try:
            text = lark_text(wanted, special_tokens(self._tokenizer, self._size), lenient=lenient)
        except FormatError as error:
            raise RequestError(str(error)) from None
        return LLMatcher(self.vocabulary, LLMatcher.grammar_from_lark(text), log_level=0, limits=limits)


class _LocalSource:
    """Computes each state in the thread that asks for it."""

    def __init__(self, steps: GrammarMatcher) -> None:
        self._steps = steps
        self._states: list[State] = []

    def send(self, step: Follow) -> None:
        self._states.append(self._steps.follow(step))

    def receive(self, patience_s: float) -> State:  # noqa: ARG002 - the state is there already
        return self._states.pop(0)

    def close(self) -> None:
        """Does nothing."""
