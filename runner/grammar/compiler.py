"""From a `Format` to a grammar that answers can follow. Takes as long, and as much memory, as the format makes it."""

from functools import cached_property
from typing import TYPE_CHECKING

from protocol.format import Format, FormatError
from runner.errors import RequestError
from runner.grammar.explain_error import explain_error
from runner.grammar.format_to_lark import lark_text
from runner.grammar.guide import Guide
from runner.grammar.matcher import GrammarMatcher
from runner.grammar.messages import Follow, State
from runner.grammar.panics import panics_as_errors
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_ITEMS = 50_000  # four for each property that may be left out, where as many may come next


class LocalGrammar:
    """A grammar that any number of answers may follow. Immutable."""

    def __init__(self, matcher: "LLMatcher", size: int) -> None:
        self._matcher = matcher
        self._size = size

    def steps(self) -> GrammarMatcher:
        """For one answer, from its beginning."""
        return GrammarMatcher(self._matcher.deep_copy())

    def guide(self) -> Guide:
        """For one answer, from its beginning, computed where it is asked for."""
        steps = self.steps()
        return Guide(_LocalSource(steps), steps.begin(), self._size)

    def release(self) -> None:
        """There will be no answer; nothing is kept for it."""


class Compiler:
    """Compiles grammars over one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size` is that of the model in tokens, 0 if it is not known."""
        self._tokenizer = tokenizer
        self._size = min(vocab_size or tokenizer.vocab_size, tokenizer.vocab_size)

    @cached_property
    def vocabulary(self) -> "LLTokenizer":
        """The tokenizer as llguidance knows it, used by all grammars. Takes a second for 100,000 tokens."""
        from runner.grammar.vocabulary import make_vocabulary

        return make_vocabulary(self._tokenizer, self._size)

    def compile(self, wanted: Format) -> LocalGrammar:
        """The grammar of `wanted`.

        Raises:
            RequestError: the format is none, or no answer in this vocabulary can even begin to follow it.
        """
        from llguidance import LLMatcher, LLParserLimits

        from runner.grammar.vocabulary import special_tokens

        limits = LLParserLimits(verbose_errors=False, max_items_in_row=_MOST_ITEMS)
        try:
            text = lark_text(wanted, special_tokens(self._tokenizer, self._size))
        except FormatError as error:
            raise RequestError(str(error)) from None
        with panics_as_errors():
            matcher = LLMatcher(self.vocabulary, LLMatcher.grammar_from_lark(text), log_level=0, limits=limits)
            if matcher.is_error():
                raise RequestError(f"Format: {explain_error(matcher.get_error(), wanted)}")
            matcher.compute_bitmask()  # the lexer's first states are the same for all answers
        compiled = LocalGrammar(matcher, self._size)
        beginning = compiled.steps().begin()
        if beginning.error and not beginning.forced:
            raise RequestError(beginning.error)
        return compiled


class _LocalSource:
    """Computes each state when it is asked for."""

    def __init__(self, steps: GrammarMatcher) -> None:
        self._steps = steps
        self._states: list[State] = []

    def send(self, step: Follow) -> None:
        self._states.append(self._steps.follow(step))

    def receive(self, patience_s: float) -> State:  # noqa: ARG002 - it has waited already
        return self._states.pop(0)

    def close(self) -> None:
        """Nothing is kept."""
