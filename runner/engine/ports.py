"""The ports through which the engine calls wings (ranks, drafts, media, formats, encoders, a tier), and the objects
that stand for a wing that is off. Owner: the engine thread, unless a class says otherwise."""

from collections.abc import Awaitable, Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, ClassVar, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar

from protocol.stats import RankCounts
from runner.errors import RequestError

if TYPE_CHECKING:
    import mlx.core as mx

    from protocol import Format, Media
    from runner.engine.answer_grammar import Grammar
    from runner.engine.policy import StepLimit
    from runner.engine.request import Request, ShownPrompt
    from runner.sampling.sample import Choice
    from runner.tokenizer import Tokenizer


class Ranks(Protocol):
    """The processes that compute the same model together. Owner: the engine thread."""

    group: "mx.distributed.Group"
    """The group of all ranks, including this one."""

    def broadcast(self, token: "mx.array") -> "mx.array":
        """Returns the tokens uint32 [B] that rank 0 drew. `token` holds the tokens that this rank drew. Lazy. Every
        rank must call this at the same point of the computation."""
        ...

    def least_budget(self, budget_bytes: int) -> int:
        """Returns the largest budget that every rank can keep, as the leader counts memory. `budget_bytes` is this
        rank's own budget. Called when the weights are loaded. On a follower the result has no meaning."""
        ...

    def counts(self) -> RankCounts:
        """Returns the counts of all ranks on the leader, and empty counts on a follower."""
        ...

    def await_cause(self, error: BaseException) -> None:
        """Waits a moment if another rank's end may have caused `error`: when noticed, that end ends this process
        too."""
        ...

    def fail(self, error: Exception) -> NoReturn:
        """Ends all ranks, because `error` occurred in this one. Raises RankError."""
        ...


class Drafter(Protocol):
    """The source of drafts for one answer. No method raises. Owner: the engine thread."""

    def index(self, tokens: int) -> None:
        """Indexes the next `tokens` tokens of the prompt, to find drafts in them (about 1 µs for each token)."""
        ...

    def close(self) -> None:
        """Frees the drafter when the answer ends."""
        ...


class Rounds(Protocol):
    """The rounds of one batch: forwards over each answer's next token and the drafts after it. Owner: the engine
    thread."""

    ahead: bool
    """True if a step without drafts may dispatch the next forward before it reads its tokens."""

    def try_step(self, limit: "StepLimit | None") -> "Sequence[Choice] | None":
        """Accepts the last round. If no tokens are drawn and a round pays off, runs a round within `limit` and returns
        the next tokens of each answer. Else returns None: a step without drafts should follow. A `limit` of None
        forbids drafts."""
        ...

    def accept(self, leaving: Collection[int] = (), *, awaiting: bool = False) -> bool:
        """Ends the last round, unless it has ended. Rewinds the layers to the end of the accepted tokens, except in the
        rows `leaving`. The accepted tokens are already recorded; if the batch is `awaiting` masks, they will be.
        Returns False if they must be computed again."""
        ...

    def measures(self) -> bool:
        """Returns True if the time of the last step should be recorded."""
        ...

    def record_time(self, seconds: float, tokens: int) -> None:
        """Records the time of the last step, which yielded `tokens` tokens over all answers of the batch."""
        ...


Shifted = Callable[[Sequence[int]], AbstractContextManager[None]]
"""A function that gets a shift for each row of a batch, and returns a block in which forwards shift positions."""


class PromptMedia(Protocol):
    """The media of one request, which are encoded and put into its prompt. Owner: the engine thread."""

    def slice_tokens(self, position: int, most: int) -> int:
        """Returns the number of tokens in the next forward at `position`: at most `most`, or more to hold a whole item.
        The forward ends before the next item. Returns 0 if the item at `position` must first be encoded: then
        `encode_piece` works on that item, and the features of other items are freed."""
        ...

    def forward(
        self,
        recorded: Sequence[int],
        at: int,
        count: int,
        layers: list[object],
        run: "Callable[[mx.array, list[object]], mx.array]",
    ) -> None:
        """Builds the forward over the `count` recorded tokens from `at` on. `slice_tokens` must have returned `count`.
        Frees the features that no later token needs."""
        ...

    def features(self, at: int, count: int) -> "Sequence[tuple[int, int, mx.array]]":
        """Returns tuples (start, stop, features [stop - start, width]) among the `count` tokens from `at` on; start and
        stop count from `at`. `slice_tokens` must have returned `count`. Frees features that no later token needs."""
        ...

    @property
    def ready(self) -> bool:
        """True if `encode_piece` can compute; False while the item is still being decoded."""
        ...

    def encode_piece(self, make_room: Callable[[int], None]) -> bool:
        """Computes one piece of the item to encode. Returns True when the features of the item are complete. Before
        encoding begins, calls `make_room` with the bytes that encoding takes at one time. Raises the errors of
        `make_room`, and MediaError for an item that cannot be decoded."""
        ...

    def close(self) -> None:
        """Frees all rows and features; the next item begins anew. May be called at any time, and twice."""
        ...


Result = TypeVar("Result")
Steps: TypeAlias = Generator["ShownPrompt | None", None, Result]
"""A check of a client's request, on the threads that prepare requests. The generator yields media that must be decoded
before the next step, or None where other work may run. Raises RequestError and BadRequestError."""


class Vision(Protocol):
    """The preparation of a model's media, without MLX. Any thread may use it."""

    @property
    def sees(self) -> bool:
        """True if the model accepts pictures, sounds or both."""
        ...

    def check(self, media: "Sequence[Media]") -> None:
        """Raises RequestError if there are `media` and the model accepts none. Changes nothing."""
        ...

    def markers(self, prompt: str) -> tuple[set[int], str]:
        """Returns the item numbers in the markers of a prompt, and the text after the last marker."""
        ...

    def expand(
        self,
        prompt: str,
        media: "Sequence[Media]",
        tokenizer: "Tokenizer",
        context_length: int,
        left: Callable[[], bool] = lambda: False,
        *,
        bos: bool = True,
    ) -> "Steps[ShownPrompt | None]":
        """Returns the tokens of a prompt with media, computed from the headers of their files; None if the prompt has
        no marker. First yields the media that must be decoded to know their number of tokens.

        `bos`: the first text begins a prompt. Stops after more than `context_length` tokens. Raises RequestError for
        media that cannot be shown, or when `left`, which is called before each item, returns True.
        """
        ...

    def join(
        self, before: Sequence[int], media: "Sequence[Media]", after: Sequence[int], left: Callable[[], bool]
    ) -> "Steps[ShownPrompt]":
        """Returns a prompt of the ids `before`, all `media`, and the ids `after`. Yields and raises as `expand`
        does."""
        ...

    def decode(self, prompt: "ShownPrompt", left: Callable[[], bool]) -> Iterator[Future[None]]:
        """Starts to decode each item that was never decoded, and yields its future. The rows are kept for the engine
        while there is room. A future raises MediaError for a damaged item, and once `left` returns True."""
        ...

    def drop(self, prompt: "ShownPrompt") -> None:
        """Frees the rows that an ended request has not used."""
        ...


@dataclass(frozen=True)
class NoVision:
    """The vision of a model that accepts no media."""

    sees: ClassVar[bool] = False
    why: str = ""
    """The reason why media are not accepted; empty for a text model."""

    def check(self, media: "Sequence[Media]") -> None:
        if media:
            why = f": {self.why}" if self.why else ""
            raise RequestError(f"this model does not support {media[0].kind or 'media'} input{why}")

    def markers(self, prompt: str) -> tuple[set[int], str]:
        return set(), prompt

    def expand(self, prompt: str, media: "Sequence[Media]", *_: object, **__: object) -> "Steps[None]":
        del prompt
        self.check(media)
        yield from ()

    def join(
        self, before: Sequence[int], media: "Sequence[Media]", after: Sequence[int], left: Callable[[], bool]
    ) -> "Steps[NoReturn]":
        del before, media, after, left
        yield from ()
        why = f": {self.why}" if self.why else ""
        raise RequestError(f"media embedding not supported on this model{why}", HTTPStatus.NOT_IMPLEMENTED)

    def decode(self, prompt: "ShownPrompt", left: Callable[[], bool]) -> Iterator[Future[None]]:
        del prompt, left
        return iter(())

    def drop(self, prompt: "ShownPrompt") -> None:
        del prompt


class Names(Protocol):
    """The names of media in the keys of caches. No name is used twice. Any thread may call this."""

    def name_of(self, digest: bytes) -> int:
        """Returns the name, a negative number, of the item with this digest. Gives it a new name if it has none."""
        ...

    def digest_of(self, name: int) -> bytes | None:
        """Returns the digest of the item with this name; None if the name is forgotten."""
        ...


class Formats(Protocol):
    """Compiles the formats of requests. Owner: the event loop."""

    def expect(self) -> "Future[Grammar]":
        """Returns an empty future for the grammar of a request that waits in the queue. `compile` fills the future."""
        ...

    def compile(self, wanted: "Format", grammar: "Future[Grammar]") -> None:
        """Starts to compile `wanted` into `grammar`; cancel that future to stop. An invalid format fails with
        RequestError."""
        ...

    def replayed(self, vocab_size: int) -> "Grammar":
        """Returns a grammar that takes all its states from a tape. Any thread may call this."""
        ...


_NO_FORMATS = "this runner was built without structured output"


class NoFormats:
    """The formats of a runner without structured output: refuses each format."""

    def expect(self) -> "Future[Grammar]":
        return Future()

    def compile(self, wanted: "Format", grammar: "Future[Grammar]") -> None:
        del wanted
        grammar.set_exception(RequestError(_NO_FORMATS))

    def replayed(self, vocab_size: int) -> "Grammar":
        del vocab_size
        raise RequestError(_NO_FORMATS)


class CheckedBody(NamedTuple):
    """A request body that was checked and can be answered."""

    answer: Callable[[], Awaitable[bytes]]
    """Returns the JSON of the answer. Raises RequestError. Cancelled if the client leaves. Owner: the event loop."""
    held_bytes: int
    """The bytes of the body that stay in memory until the answer is complete."""
    shown: "ShownPrompt | None" = None
    """The media to decode before `answer` is called."""


class WingEndpoint(NamedTuple):
    """A POST endpoint of a model that makes no text. The server reads the bodies and writes the answers."""

    most_bytes: int
    """The most bytes of a body."""
    check: "Callable[[Sequence[bytes]], Steps[CheckedBody]]"
    """Checks a body, given as the pieces in which it arrived."""


class EncoderUse(NamedTuple):
    """The uses of a model that makes no text. Empty for a model that makes text. Any thread may read it."""

    makes: str = ""
    """The results that the model makes instead of text, and the endpoint for them."""
    endpoints: Mapping[str, WingEndpoint] = {}
    """The endpoints by path."""
    dimensions: Sequence[int] = ()
    """The sizes to which an embedding may be cut."""

    def refuse_prompts(self) -> None:
        """Raises RequestError if the model makes no text."""
        if self.makes:
            raise RequestError(f"this model makes {self.makes}, not text", HTTPStatus.NOT_IMPLEMENTED)


class Beside(Protocol):
    """Work beside the requests, done in pieces between slices. Owner: the engine thread."""

    name: str
    """The name of the work in the trace."""

    def pending(self, *, idle: bool) -> bool:
        """Returns True if `advance` has work. `idle` is True if the engine has nothing else to compute."""
        ...

    def advance(self, *, idle: bool, interrupted: Callable[[], bool]) -> None:
        """Does a piece of the work. Must not raise. A piece takes no longer than a slice of a prompt; only while the
        engine is `idle` may it go on until `interrupted` returns True."""
        ...


class Tier(Beside, Protocol):
    """The disk cache as a tier below memory. A fault in the tier must not stop answers. Owner: the engine thread."""

    @property
    def patience_s(self) -> float | None:
        """The longest time that the engine may wait for a message, in seconds. None sets no limit."""
        ...

    def add(self, request: "Request") -> None:
        """Queues a request, which cannot begin while the tier looks for its prompt."""
        ...

    def keep(self, receive: Callable[[], None]) -> None:
        """Ends all requests, and writes cached conversations to disk. `receive` waits for a message and handles it."""
        ...
