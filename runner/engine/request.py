"""A request to the engine, and the limits that a request must keep."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple, Protocol

from protocol import Format
from runner.engine.events import EventStream
from runner.errors import RequestError
from runner.sampling import SamplingOptions
from runner.tokenizer.detokenizer import StopStrings

if TYPE_CHECKING:
    from runner.engine.answer_grammar import Grammar

_ASSUMED_CONTEXTS = ((47, 262144), (23, 32768), (0, 4096))
"""Pairs: the least GPU memory in GiB, and the `num_ctx` that hosts send for that memory if nobody chose one."""
_numbers = count(1)


class Limits(NamedTuple):
    """The limits of a model, or of one request to a model, in tokens."""

    context_length: int
    vocab_size: int
    assumed_context: int = 0
    """The `num_ctx` that a host sends if nobody chose one (docs/internals/wire.md, 2.5)."""
    chosen: bool = False
    """True if the request's `num_ctx` sets `context_length`, False if the model does."""

    def on_gpus(self, gpu_bytes: int) -> "Limits":
        """Returns the limits on a machine whose GPUs together have `gpu_bytes` of memory."""
        assumed = next(tokens for least_gib, tokens in _ASSUMED_CONTEXTS if gpu_bytes >= least_gib << 30)
        return self._replace(assumed_context=assumed)

    def within(self, num_ctx: int) -> "Limits":
        """Returns the limits of a request with this `num_ctx`, which counts unless it is what hosts assume."""
        if 0 < num_ctx < self.context_length and num_ctx != self.assumed_context:
            return self._replace(context_length=num_ctx, chosen=True)
        return self

    def refuse_beyond(self, count: int) -> None:
        """Raises RequestError if a prompt of `count` tokens or more leaves no room for an answer."""
        if count >= self.context_length:
            what = "context length that num_ctx sets" if self.chosen else "model's maximum context length"
            raise RequestError(f"input length ({count} tokens) exceeds the {what} ({self.context_length} tokens)")


class ShownPrompt(Protocol):
    """A prompt with media. Immutable; any thread may read it."""

    ids: list[int]
    """The tokens of the prompt, with soft tokens in the places of media."""
    keys: list[int]
    """The tokens as caches compare them: soft tokens are replaced by their item's name, a negative number."""
    shift: int
    """The position of a token after the prompt, less its offset; 0 or negative."""

    @property
    def nbytes(self) -> int:
        """The bytes of the media's files."""
        ...


@dataclass(eq=False, kw_only=True)
class Request:
    """A completion to compute. It is made outside the engine thread; any thread may cancel it."""

    prompt: list[int]
    """The ids of the prompt, with soft tokens in the places of media."""
    max_tokens: int
    sampling: SamplingOptions
    stops: StopStrings | None
    metered: bool
    most_drafts: int | None = None
    """The most drafts of one step. None sets no limit: as many drafts as pay off."""
    shown: ShownPrompt | None = None
    """The prompt together with its media; None for a prompt without media."""
    format: Format | None = None
    """The format that the answer must follow."""
    grammar: "Future[Grammar] | None" = None
    """The grammar of `format`, which is compiled while the prompt is computed."""
    stream: EventStream = field(default_factory=EventStream)
    cancelled: bool = False
    restoring: bool = False
    """True while the disk cache looks for the prompt: the request cannot begin yet. Set by the engine thread."""
    restored: int = 0
    """The number of the prompt's tokens that came from disk. Set by the engine thread."""
    number: int = field(default_factory=_numbers.__next__)
    """The number that names this request in the log."""
    arrived_ns: int = field(default_factory=perf_counter_ns)

    @property
    def keys(self) -> list[int]:
        """The tokens of the prompt as caches compare them: soft tokens are replaced by their item's name."""
        return self.prompt if self.shown is None else self.shown.keys

    def cancel(self) -> None:
        """Cancels the request: the engine drops the request before the next slice."""
        self.cancelled = True
        if self.grammar is not None and not self.grammar.cancel() and self.grammar.exception() is None:
            self.grammar.result().release()
