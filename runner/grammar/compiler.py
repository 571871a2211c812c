"""Compiles a `Format` into a grammar. Time and memory depend on the format and have no bound here."""

from functools import cached_property
from typing import TYPE_CHECKING

from protocol.format import Format, FormatError
from runner.errors import RequestError
from runner.grammar.explain_error import explain_error, is_unsupported
from runner.grammar.format_to_lark import lark_text
from runner.grammar.guide import Guide
from runner.grammar.matcher import GrammarMatcher
from runner.grammar.messages import Follow, State
from runner.grammar.panics import panics_as_errors
from runner.grammar.rewriter import pruned, rewritten
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

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
