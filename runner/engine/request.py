"""Turns what a client sent into a request for the engine: validates, tokenizes, validates again."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count
from time import perf_counter_ns
from typing import TYPE_CHECKING, ClassVar, NamedTuple, NoReturn, Protocol

from protocol import CompletionRequest, Format, FormatError, Media, decode_format
from runner.engine.events import EventStream
from runner.errors import RequestError
from runner.sampling import SamplingOptions
from runner.tokenizer import PART_CHARACTERS, Tokenizer
from runner.tokenizer.detokenizer import StopStrings

if TYPE_CHECKING:
    from runner.engine.answer_grammar import Grammar

_MOST_LOGPROBS = 20  # hosts do not ask for more
_MOST_STOP_CHARACTERS = 65536
_LONGEST_TOKEN_BYTES = 64  # at least: with normalizers and unknown words, a token may stand for more than its own text
_CHARACTERS_PER_TOKEN = 8  # twice that of prose; a prompt with more per token of context is encoded in parts
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


class UnmeasuredError(RequestError):
    """A prompt shows media whose tokens only a helper can tell. `prompt` shows them, and nothing else."""

    def __init__(self, prompt: ShownPrompt) -> None:
        super().__init__(
            "other pictures and sounds took its place meanwhile: send it again", HTTPStatus.SERVICE_UNAVAILABLE
        )
        self.prompt = prompt


class Vision(Protocol):
    """What a model makes of the media of a request. Any thread may use it: nothing here touches MLX."""

    @property
    def sees(self) -> bool:
        """True if the model takes media of some kind."""
        ...

    def check(self, media: Sequence[Media]) -> None:
        """Raises RequestError if there are media, but no model to take them. Changes nothing."""
        ...

    def expand(
        self,
        prompt: str,
        media: Sequence[Media],
        tokenizer: Tokenizer,
        context_length: int,
        left: Callable[[], bool] = lambda: False,
        *,
        bos: bool = True,
    ) -> ShownPrompt | None:
        """Returns the tokens of a prompt with media, from the headers of their files; None if it has no marker.

        `bos`: the first text begins a prompt. Stops once there are more than `context_length` tokens. Raises
        RequestError for what cannot be shown, and when `left`, which is asked before each item, returns True;
        UnmeasuredError until what that names was decoded.
        """
        ...

    def join(
        self, before: Sequence[int], media: Sequence[Media], after: Sequence[int], left: Callable[[], bool]
    ) -> ShownPrompt:
        """Returns a prompt of ids, all of these media, and ids, from the headers of the files. Raises as `expand`."""
        ...

    def decode(self, prompt: ShownPrompt, left: Callable[[], bool]) -> Iterator[Future[None]]:
        """Yields the items that were never decoded, each being decoded from then on. Keeps their rows for the engine,
        while there is room. A future raises MediaError for a damaged one, and once `left` returns True."""
        ...

    def drop(self, prompt: ShownPrompt) -> None:
        """Frees the rows that a request, which has ended, did not come to take."""
        ...


@dataclass(frozen=True)
class NoVision:
    """A model that takes no media."""

    sees: ClassVar[bool] = False
    why: str = ""
    """Empty for a text model."""

    def check(self, media: Sequence[Media]) -> None:
        if media:
            why = f": {self.why}" if self.why else ""
            raise RequestError(f"this model does not support {media[0].kind or 'media'} input{why}")

    def expand(self, prompt: str, media: Sequence[Media], *_: object, **__: object) -> None:
        del prompt
        self.check(media)

    def join(
        self, before: Sequence[int], media: Sequence[Media], after: Sequence[int], left: Callable[[], bool]
    ) -> NoReturn:
        del before, media, after, left
        why = f": {self.why}" if self.why else ""
        raise RequestError(f"media embedding not supported on this model{why}", HTTPStatus.NOT_IMPLEMENTED)

    def decode(self, prompt: ShownPrompt, left: Callable[[], bool]) -> Iterator[Future[None]]:
        del prompt, left
        return iter(())

    def drop(self, prompt: ShownPrompt) -> None:
        del prompt


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


def most_prompt_bytes(tokenizer: Tokenizer, context_length: int) -> int:
    """Returns an upper bound, in UTF-8, for prompts that fit into the context. Walks the vocabulary the first time."""
    return context_length * max(tokenizer.longest_bytes, _LONGEST_TOKEN_BYTES)


def refuse_size(size: int, tokenizer: Tokenizer, limits: Limits) -> NoReturn:
    """Raises RequestError for a prompt of more than `most_prompt_bytes`, with the fewest tokens that it can have."""
    context_length = limits.context_length
    limits.refuse_beyond(size * context_length // most_prompt_bytes(tokenizer, context_length))
    raise AssertionError("a prompt of this size fits")


def checked_format(wire: CompletionRequest, vision: Vision) -> Format | None:
    """Returns the format that the answer must follow. Raises RequestError for an invalid one, then for media that the
    model cannot take."""
    try:
        wanted = decode_format(bytes(wire.format))
    except FormatError as error:
        raise RequestError(str(error)) from None
    vision.check(wire.media)
    return wanted


def check_length_in_parts(text: str, tokenizer: Tokenizer, limits: Limits) -> Iterator[None]:
    """Encodes a prompt that is probably too long, one part with each step. Raises RequestError as soon as it is.

    All of it at once would take 100 times its memory. The count that the client reads is that of the parts encoded so
    far. Does nothing for a prompt that has few enough characters.
    """
    if len(text) <= max(PART_CHARACTERS, limits.context_length * _CHARACTERS_PER_TOKEN):
        return
    count = 0
    for ids in tokenizer.encode_parts([text]):
        count += len(ids)
        limits.refuse_beyond(count)
        yield


def prepare(
    wire: CompletionRequest,
    tokenizer: Tokenizer,
    limits: Limits,
    wanted_format: Format | None,
    vision: Vision = NoVision(),
    left: Callable[[], bool] = lambda: False,
) -> Request:
    """Returns the request to compute. Raises RequestError, in the words that hosts know, if it cannot be computed.

    Its media are known by their headers; they have yet to be decoded. Gives up between two of them when `left` returns
    True. Raises UnmeasuredError as `Vision.expand`.
    """
    shown = vision.expand(wire.prompt, wire.media, tokenizer, limits.context_length, left) if wire.media else None
    prompt = tokenizer.encode(wire.prompt) if shown is None else shown.ids
    if not prompt:
        raise RequestError("empty prompt")
    limits.refuse_beyond(len(prompt))
    _refuse_unknown_tokens(prompt if shown is None else shown.keys, tokenizer, limits.vocab_size)
    room = limits.context_length - len(prompt)
    wanted = wire.options.num_predict
    return Request(
        prompt=prompt,
        max_tokens=min(wanted, room) if wanted > 0 else room,
        sampling=_sampling(wire),
        stops=_stops(wire.options.stop),
        metered=wire.include_intermediate_metrics,
        most_drafts=wire.options.draft_num_predict if wire.options.draft_num_predict > 0 else None,
        shown=shown,
        format=wanted_format,
    )


def _refuse_unknown_tokens(prompt: Sequence[int], tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuses tokens (of media, say) for which the model has no embedding: MLX would read foreign memory."""
    token = max(prompt)
    if token >= vocab_size > 0:
        text = tokenizer.token_text(token)
        raise RequestError(
            f"the model has no token {token} ({text!r}): its vocabulary has {vocab_size}; leave it out of the prompt"
        )


def _stops(wanted: Sequence[str]) -> StopStrings | None:
    characters = sum(map(len, wanted))
    if characters > _MOST_STOP_CHARACTERS:
        raise RequestError(f"the stop strings have {characters} characters, and the limit is {_MOST_STOP_CHARACTERS}")
    return StopStrings(wanted) if characters else None


def _sampling(wire: CompletionRequest) -> SamplingOptions:
    options = wire.options
    return SamplingOptions(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repeat_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repeat_last_n=options.repeat_last_n,
        seed=wire.seed,
        logprobs=bool(wire.logprobs),
        top_logprobs=min(max(0, wire.top_logprobs), _MOST_LOGPROBS) if wire.logprobs else 0,
    )


def out_of_range(wire: CompletionRequest, sampling: SamplingOptions) -> Iterator[tuple[str, float, str]]:
    """Yields the keys with values that mean nothing, each with what is taken instead. `sampling` was made of them."""
    for name, value, instead in sampling.out_of_range():
        yield f"Options.{name}", value, instead
    if wire.top_logprobs != sampling.top_logprobs:
        instead = f"{sampling.top_logprobs}{'' if wire.logprobs else ', without Logprobs'}"
        yield "TopLogprobs", wire.top_logprobs, instead
