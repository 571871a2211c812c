"""Grammars, compiled off the event loop and the engine's thread, and kept for the next request that wants the same."""

from collections import OrderedDict
from concurrent.futures import Executor, Future
from threading import Lock
from typing import TYPE_CHECKING

from protocol.format import Format, FormatError
from runner.errors import RequestError
from runner.grammar.faults import explained
from runner.grammar.guide import Guide
from runner.grammar.lark import lark_text
from runner.grammar.panics import told_as_errors
from runner.logs import Log
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = Log(__name__)
_MOST_KEPT = 32
_MOST_KEPT_CHARACTERS = 4 << 20
_MOST_ITEMS = 50_000  # four for each property that may be left out, where as many may come next


class Compiled:
    """A grammar that any number of answers may follow. Immutable."""

    def __init__(self, matcher: "LLMatcher", size: int) -> None:
        self._matcher = matcher
        self._size = size

    def guide(self) -> Guide:
        """For one answer, from its beginning."""
        return Guide(self._matcher.deep_copy(), self._size)


class Compiler:
    """Compiles grammars over one tokenizer. Any thread may call `submit`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, helper: Executor) -> None:
        """`vocab_size` is that of the model, 0 if it is not known; `helper` runs what takes long."""
        self._tokenizer = tokenizer
        self._size = min(vocab_size or tokenizer.vocab_size, tokenizer.vocab_size)
        self._helper = helper
        self._lock = Lock()
        self._building = Lock()
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[str, Future[Compiled]] = OrderedDict()

    def submit(self, wanted: Format) -> Future[Compiled]:
        """Begin to compile; of the same grammar only once. The future raises RequestError for one that is none.

        Raises:
            RequestError: the format is none, as is seen without compiling it.
        """
        from runner.grammar.vocabulary import special_tokens

        try:
            text = lark_text(wanted, special_tokens(self._tokenizer, self._size))
        except FormatError as error:
            raise RequestError(str(error)) from None
        with self._lock:
            known = self._kept.get(text)
            if known is not None and not (known.done() and known.exception()):
                self._kept.move_to_end(text)
                return known
            compiling = self._helper.submit(told_as_errors()(self._compile), text, wanted)
            self._keep(text, compiling)
        return compiling

    def _keep(self, text: str, compiling: "Future[Compiled]") -> None:
        self._kept[text] = compiling
        while len(self._kept) > 1 and (
            len(self._kept) > _MOST_KEPT or sum(map(len, self._kept)) > _MOST_KEPT_CHARACTERS
        ):
            self._kept.popitem(last=False)

    def _compile(self, text: str, wanted: Format) -> Compiled:
        from llguidance import LLMatcher, LLParserLimits

        with self._building:
            if self._vocabulary is None:
                from runner.grammar.vocabulary import make_vocabulary

                self._vocabulary = make_vocabulary(self._tokenizer, self._size)
        limits = LLParserLimits(verbose_errors=False, max_items_in_row=_MOST_ITEMS)
        matcher = LLMatcher(self._vocabulary, LLMatcher.grammar_from_lark(text), log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestError(f"Format: {explained(matcher.get_error(), wanted)}")
        matcher.compute_bitmask()  # the lexer's first states are the same for all answers
        compiled = Compiled(matcher, self._size)
        compiled.guide()  # raises for one that nobody can even begin to follow
        return compiled
