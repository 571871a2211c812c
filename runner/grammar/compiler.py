"""Compiles a `Format` into a grammar. The caller must bound the time and the memory for this."""

import re
from functools import cached_property

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from protocol.format import Format, FormatError, JsonSchema
from runner.errors import RequestError
from runner.grammar.explain_error import explain_error, is_unsupported, panics_as_errors
from runner.grammar.format_to_lark import lark_text
from runner.grammar.matcher import GrammarMatcher
from runner.grammar.messages import State
from runner.grammar.number_bounds import ANY_END, LONG_NUMBER, NUMBER_END, NumberBounds, bounds_text
from runner.grammar.patterns.schemas import with_translated_patterns
from runner.grammar.rewriter import pruned, rewritten
from runner.grammar.vocabulary import make_vocabulary, special_tokens
from runner.tokenizer import Tokenizer

_MOST_ITEMS = 50_000  # in a row of llguidance's parser; an optional property takes four


class Compiler:
    """Compiles grammars for the vocabulary of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """The grammars are over the first `vocab_size` tokens, which the model knows; over all tokens if that is 0."""
        self._tokenizer = tokenizer
        self._size = min(vocab_size or tokenizer.vocab_size, tokenizer.vocab_size)

    @cached_property
    def vocabulary(self) -> LLTokenizer:
        """The tokenizer in llguidance's form, for all grammars. The first use takes a second for 100,000 tokens."""
        return make_vocabulary(self._tokenizer, self._size)

    @cached_property
    def _special(self) -> dict[str, int]:
        return special_tokens(self._tokenizer, self._size)

    def compile(self, wanted: Format) -> tuple[GrammarMatcher, State]:
        """Rewrites the schemas of `wanted`, leaves out parts that cannot be enforced, and compiles the result. Returns
        a matcher for one answer, and the state at the beginning of the answer; `left_out` of the state names the parts
        left out. Raises RequestError if the format is invalid, or if no token of the vocabulary can begin an answer."""
        with panics_as_errors():
            for form in (rewritten(wanted), wanted):  # if the rewritten form does not compile, the original is tried
                form, left_out = with_translated_patterns(form)
                matcher = self._matcher(form, lenient=False)
                if matcher.is_error() and is_unsupported(matcher.get_error()):
                    left_out = left_out or explain_error(matcher.get_error(), form)
                    matcher = self._matcher(pruned(form), lenient=True)
                if not matcher.is_error():
                    break
            else:
                raise RequestError(f"Format: {explain_error(matcher.get_error(), form)}")
            answer = GrammarMatcher(matcher, self._bounds_of(form))
        beginning = answer.begin()
        if beginning.error and not beginning.forced:
            raise RequestError(beginning.error)
        return answer, msgspec.structs.replace(beginning, left_out=left_out)

    @cached_property
    def bounds(self) -> tuple[str, LLMatcher]:
        """The number bounds of a format that is one schema (most are): the text of a grammar, a matcher to copy."""
        text = bounds_text(JsonSchema(msgspec.Raw(b"{}")), self._special)
        self._numbers  # noqa: B018 - computes it too before workers are forked
        return text, self._from_lark(text)

    @cached_property
    def _numbers(self) -> re.Pattern[bytes]:
        """A pattern that finds texts after which the next token may make a number too long."""
        spelled = b"\n".join(map(self._tokenizer.token_bytes, range(self._size)))
        return ANY_END if LONG_NUMBER.search(spelled) else NUMBER_END

    def _bounds_of(self, wanted: Format) -> NumberBounds | None:
        text, (usual, known) = bounds_text(wanted, self._special), self.bounds
        if not text:
            return None
        matcher = known.deep_copy() if text == usual else self._from_lark(text)
        return NumberBounds(matcher, self._tokenizer.token_bytes, self._numbers)

    def _matcher(self, wanted: Format, *, lenient: bool) -> LLMatcher:
        try:
            text = lark_text(wanted, self._special, lenient=lenient)
        except FormatError as error:
            raise RequestError(str(error)) from None
        return self._from_lark(text)

    def _from_lark(self, text: str) -> LLMatcher:
        limits = LLParserLimits(verbose_errors=False, max_items_in_row=_MOST_ITEMS)
        return LLMatcher(self.vocabulary, LLMatcher.grammar_from_lark(text), log_level=0, limits=limits)
