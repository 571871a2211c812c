"""Compiles a `Format` into a grammar. Time and memory depend on the format and have no bound here."""

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from time import process_time

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from protocol.format import Format, FormatError, JsonSchema
from runner.errors import RequestError
from runner.grammar.explain_error import explain_error, is_unsupported, panics_as_errors
from runner.grammar.format_to_lark import ANY_END, LONG_NUMBER, MOST_NUMBER_END, NUMBER_END, bounds_text, lark_text
from runner.grammar.guide import Follow, State
from runner.grammar.patterns.schemas import with_translated_patterns
from runner.grammar.rewriter import pruned, rewritten
from runner.tokenizer import Tokenizer

# --- Follows one answer through its grammar with llguidance.

_TRY_S = 0.003
_REASONS = {
    "NoExtensionBias": "no tokens of the model spell the text that must come next",
    "ParserTooComplex": "it is too ambiguous; let its alternatives begin differently",
    "LexerTooComplex": "its texts are too complex; make patterns and length limits simpler",
}
"""llguidance's name for a failure -> the explanation, with advice where there is any."""


class NumberBounds:
    """Follows an answer beside its grammar, and keeps its numbers short."""

    def __init__(self, matcher: LLMatcher, spell: Callable[[int], bytes], where: re.Pattern[bytes]) -> None:
        """Takes over `matcher`, which allows all but long numbers, at its beginning. It computes masks only after texts
        that end as in `where`: a mask of its own takes as long as one of the grammar."""
        self._matcher = matcher
        self._spell = spell
        self._where = where
        self._end = b""

    def copy(self) -> "NumberBounds":
        """Returns bounds of its own at the same position."""
        copied = NumberBounds(self._matcher.deep_copy(), self._spell, self._where)
        copied._end = self._end
        return copied

    def reset(self) -> None:
        """Goes back to the beginning."""
        self._matcher.reset()
        self._end = b""

    def consume(self, tokens: Sequence[int]) -> None:
        """Advances by `tokens`."""
        self._matcher.consume_tokens([*tokens])
        self._end = b"".join([self._end, *map(self._spell, tokens)])[-MOST_NUMBER_END:]

    def narrowed(self, mask: bytes) -> bytes:
        """Returns the part of a mask that is within the bounds; all of it where a number has to be longer."""
        if not self._where.search(self._end) or self._matcher.is_error():
            return mask
        both = int.from_bytes(mask, "little") & int.from_bytes(self._matcher.compute_bitmask(), "little")
        return both.to_bytes(len(mask), "little") if both else mask


class GrammarMatcher:
    """Advances one answer through its grammar, token by token.

    Where the grammar leaves no choice, the forced text comes in the tokens that the tokenizer would make of it. So an
    answer has the same tokens whether it is computed alone or in a batch.
    """

    def __init__(self, matcher: LLMatcher, bounds: NumberBounds | None) -> None:
        """Takes over `matcher`, which is at its beginning and not shared, and `bounds`."""
        self._matcher = matcher
        self._bounds = bounds

    def copy(self) -> "GrammarMatcher":
        """Returns a matcher of its own at the same position."""
        return GrammarMatcher(self._matcher.deep_copy(), self._bounds.copy() if self._bounds else None)

    def begin(self) -> State:
        """Returns the state at the beginning of an answer."""
        return self._state(lambda: self._look_ahead())

    def follow(self, step: Follow) -> State:
        """Returns the state after the tokens of `step`, or what may come after them."""
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
        """Returns what may come after each of these tokens, as far as that is found in a moment. The matcher stays."""
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
            pass  # this token may not come, or takes too much
        return tried

    def _restart(self, tokens: Sequence[int]) -> deque[int]:
        self._matcher.reset()
        if self._bounds:
            self._bounds.reset()
        return self._take(self._look_ahead(), tokens)

    def _take(self, forced: deque[int], tokens: Sequence[int]) -> deque[int]:
        """Continues with `tokens`, which must begin with `forced`. Returns the tokens that are forced after them."""
        for token in tokens:
            if not forced:
                self._consume([token])
                forced = self._look_ahead()
            elif forced.popleft() != token:
                raise RequestError(f"the grammar does not allow token {token}")
        return forced

    def _look_ahead(self) -> deque[int]:
        """Advances the matcher to the next choice. Returns the tokens that lead there."""
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


_MOST_ITEMS = 50_000  # a row has four for each optional property that may come next


class Compiler:
    """Compiles grammars over one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Uses the first `vocab_size` tokens, the vocabulary of the model; 0 if that is unknown."""
        self._tokenizer = tokenizer
        self._size = min(vocab_size or tokenizer.vocab_size, tokenizer.vocab_size)

    @cached_property
    def vocabulary(self) -> LLTokenizer:
        """The tokenizer as llguidance needs it, shared by all grammars. Takes a second for 100,000 tokens."""
        return make_vocabulary(self._tokenizer, self._size)

    @cached_property
    def _special(self) -> dict[str, int]:
        return special_tokens(self._tokenizer, self._size)

    def compile(self, wanted: Format) -> tuple[GrammarMatcher, State]:
        """Compiles `wanted`, with its schemas rewritten and without what of them cannot be enforced. Returns a matcher
        for one answer, and the state at its beginning, which names what was left out.

        Raises:
            RequestError: the format is invalid, or no answer in this vocabulary can begin to follow it.
        """
        with panics_as_errors():
            for form in (rewritten(wanted), wanted):  # rewriting never refuses what could be served as it is
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
        """The bounds of a format that is one schema, which most formats are: their grammar, and a matcher to copy."""
        text = bounds_text(JsonSchema(msgspec.Raw(b"{}")), self._special)
        self._numbers  # noqa: B018 - made with them, before workers are forked
        return text, self._from_lark(text)

    @cached_property
    def _numbers(self) -> re.Pattern[bytes]:
        """Finds out from the end of an answer whether its next token may make a number too long."""
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


# --- The tokenizer in the form that llguidance needs: the bytes of every token, the special tokens, and `encode`.

_MOST_BYTES = 1000  # longest token; llguidance allows 24 more, and grammars have no use for longer ones
_END = b"<end>"
_BEFORE = "\n"  # some tokenizers put a space before a text, which is wrong in the middle of an answer


def special_tokens(tokenizer: Tokenizer, size: int) -> dict[str, int]:
    """Returns the ids of the special tokens by their text, without those that end an answer."""
    return {tokenizer.token_text(token): token for token in sorted(tokenizer.special - tokenizer.eos) if token < size}


def make_vocabulary(tokenizer: Tokenizer, size: int) -> LLTokenizer:
    """Returns the first `size` tokens of `tokenizer` as a vocabulary. Takes a second for 100,000 tokens.

    A model without an end token gets one that it cannot draw; its answers end where their grammar does.
    """
    view = _TokenizerView(tokenizer, size)
    return LLTokenizer(TokenizerWrapper(view), n_vocab=len(view.tokens), eos_token=view.ends)


class _TokenizerView:
    """The tokenizer interface that llguidance calls. Nothing here may raise: that would be a panic in Rust."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer = tokenizer
        spelled = map(tokenizer.token_bytes, range(size))
        self.tokens = [data if len(data) <= _MOST_BYTES else b"" for data in spelled]
        self.ends = sorted(token for token in tokenizer.eos if token < size)
        if not self.ends:
            self.ends = [size]
            self.tokens.append(_END)
        self.eos_token_id = self.ends[0]
        self.bos_token_id = tokenizer.bos
        self.special_token_ids = sorted({*self.ends, *(token for token in tokenizer.special if token < size)})
        self._special = frozenset(self.special_token_ids)

    def __call__(self, text: bytes) -> list[int]:
        """Returns the tokens of a text in the middle of an answer."""
        whole = text.decode(errors="replace")
        for before in ("", _BEFORE):
            ids = self._tokenizer.encode(before + whole)
            ids = ids[len(self._tokenizer.encode(before)) :] if before else ids
            if self._special.isdisjoint(ids) and b"".join(map(self._tokenizer.token_bytes, ids)) == text:
                return ids
        return [*self._longest(text)]

    def _longest(self, text: bytes) -> Iterator[int]:
        """Yields the longest token at each position and skips bytes that no token spells.

        Used, for example, for texts that spell special tokens.
        """
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._most_bytes), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is not None:
                yield self._ids[text[at:end]]
            at = end or at + 1

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        ids = {data: token for token, data in reversed([*enumerate(self.tokens)]) if token not in self._special}
        return {data: token for data, token in ids.items() if data}

    @cached_property
    def _most_bytes(self) -> int:
        return max(map(len, self._ids), default=0)
