"""A request to the engine, and the limits that it keeps."""

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
"""GiB of GPU memory, and the `num_ctx` that hosts send from there on if nobody chose one."""
_numbers = count(1)


class Limits(NamedTuple):
    """The limits of a model, or of one request to it, in tokens."""

    context_length: int
    vocab_size: int
    assumed_context: int = 0
    """The `num_ctx` that a host sends if nobody chose one (docs/internals/wire.md, 2.5)."""
    chosen: bool = False
    """True if `num_ctx` sets `context_length`, False if the model does."""

    def on_gpus(self, gpu_bytes: int) -> "Limits":
        """Returns the limits of a model on a machine whose GPUs have `gpu_bytes` of memory in all."""
        assumed = next(tokens for least_gib, tokens in _ASSUMED_CONTEXTS if gpu_bytes >= least_gib << 30)
        return self._replace(assumed_context=assumed)

    def within(self, num_ctx: int) -> "Limits":
        """Returns the limits of a request with this `num_ctx`, which lowers the context if somebody chose it."""
        if 0 < num_ctx < self.context_length and num_ctx != self.assumed_context:
            return self._replace(context_length=num_ctx, chosen=True)
        return self

    def refuse_beyond(self, count: int) -> None:
        """Raises RequestError if a prompt of `count` tokens or more leaves no room for an answer."""
        if count >= self.context_length:
            what = "context length that num_ctx sets" if self.chosen else "model's maximum context length"
            raise RequestError(f"input length ({count} tokens) exceeds the {what} ({self.context_length} tokens)")


class ShownPrompt(Protocol):
    """A prompt that shows media. Immutable; any thread may read it."""

    ids: list[int]
    """Its tokens; those of soft tokens stand in the places of media."""
    keys: list[int]
    """The same as caches compare them: in the place of an item stands its name, a negative number."""
    shift: int
    """The position of a token after the prompt, less its offset; 0 or negative."""

    @property
    def nbytes(self) -> int:
        """The bytes of the files."""
        ...


@dataclass(eq=False, kw_only=True)
class Request:
    """A completion to compute. Made off the engine thread; any thread may cancel it."""

    prompt: list[int]
    """The ids of the prompt; those of soft tokens stand in the places of media."""
    max_tokens: int
    sampling: SamplingOptions
    stops: StopStrings | None
    metered: bool
    most_drafts: int | None = None
    """The most drafts of one step; None: as many as pay."""
    shown: ShownPrompt | None = None
    """The same prompt, with its media."""
    format: Format | None = None
    """The format that the answer must follow."""
    grammar: "Future[Grammar] | None" = None
    """The same format, being compiled while the prompt is computed."""
    stream: EventStream = field(default_factory=EventStream)
    cancelled: bool = False
    restoring: bool = False
    """True while the disk is asked for its prompt: it cannot begin. Set by the engine thread, as the following."""
    restored: int = 0
    """The tokens of the prompt that were brought from disk."""
    number: int = field(default_factory=_numbers.__next__)
    """The name of this request in the log, where the lines of several requests alternate."""
    arrived_ns: int = field(default_factory=perf_counter_ns)

    @property
    def keys(self) -> list[int]:
        """The tokens of the prompt as caches compare them: in the place of an item stands its name."""
        return self.prompt if self.shown is None else self.shown.keys

    def cancel(self) -> None:
        """Cancels the request: the engine drops it at its next slice."""
        self.cancelled = True
        if self.grammar is not None and not self.grammar.cancel() and self.grammar.exception() is None:
            self.grammar.result().release()
