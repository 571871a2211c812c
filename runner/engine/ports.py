"""The ports to wings: ranks, drafts, media, formats, encoders, and a tier; and the objects that stand for a wing that
is off. Owner: the engine thread, except where a class says otherwise."""

from collections.abc import Awaitable, Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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
    """The other processes that compute the same model. Owner: the engine thread."""

    group: "mx.distributed.Group"
    """All ranks, this one among them."""

    def broadcast(self, token: "mx.array") -> "mx.array":
        """Returns the tokens uint32 [B] that rank 0 drew. `token` are those of this rank. Lazy. All ranks call it at
        the same place."""
        ...

    def least_budget(self, budget_bytes: int) -> int:
        """Returns the memory budget, as the leader counts it, that every rank can keep. `budget_bytes` is this rank's
        own. Called when the weights are loaded. On a follower the result means nothing."""
        ...

    def counts(self) -> RankCounts:
        """Returns the numbers of all ranks on the leader; empty ones on a follower."""
        ...

    def await_cause(self, error: BaseException) -> None:
        """Waits a moment if the end of another rank may have caused this error: once noticed, it ends this process."""
        ...

    def fail(self, error: Exception) -> NoReturn:
        """Ends all ranks, because this error struck here. Raises RankError."""
        ...


class Drafter(Protocol):
    """Drafts one answer. No call raises. Owner: the engine thread."""

    def index(self, tokens: int) -> None:
        """Indexes the next `tokens` prompt tokens (about 1 µs each)."""
        ...

    def close(self) -> None:
        """Ends the answer."""
        ...


class Rounds(Protocol):
    """The rounds of drafts of one batch: forwards over the next token of each answer and drafts of those after it.
    Owner: the engine thread."""

    ahead: bool
    """True if a plain step may dispatch the next forward before it reads its tokens."""

    def try_step(self, limit: "StepLimit | None") -> "Sequence[Choice] | None":
        """Accepts the last round, and runs another within the limit if that pays and no tokens are drawn. Returns the
        next tokens of each answer, or None if a plain step should follow. A limit of None forbids drafts."""
        ...

    def accept(self, leaving: Collection[int] = (), *, awaiting: bool = False) -> bool:
        """Ends the last round, if it has not ended. Rewinds the layers to the end of its accepted tokens, except in
        rows that are `leaving`. These tokens are recorded already or, if the batch is `awaiting` masks, will be.
        Returns False if they have to be computed again."""
        ...

    def measures(self, steps: int) -> bool:
        """Returns True if the time of the step of this number should be recorded."""
        ...

    def record_time(self, seconds: float, tokens: int) -> None:
        """Records the time of the last step, which yielded `tokens` tokens over all answers."""
        ...


Shifted = Callable[[Sequence[int]], AbstractContextManager[None]]
"""Returns a block in which forwards shift the positions of each row of a batch by its own number."""


class PromptMedia(Protocol):
    """The media of one request, on their way into its prompt. Owner: the engine thread."""

    def slice_tokens(self, position: int, most: int) -> int:
        """Returns the tokens of the next forward at `position`: at most `most`, unless it has to hold a whole item.

        The forward ends before the next item. Returns 0 if the item at `position` has to be encoded first:
        `encode_piece` then works on it, and the features of other items are freed.
        """
        ...

    def forward(
        self,
        recorded: Sequence[int],
        at: int,
        count: int,
        layers: list[object],
        run: "Callable[[mx.array, list[object]], mx.array]",
    ) -> None:
        """Builds the forward over the `count` recorded tokens from `at` on, as many as `slice_tokens` gave. Frees the
        features that no later token needs."""
        ...

    def features(self, at: int, count: int) -> "Sequence[tuple[int, int, mx.array]]":
        """Returns features [stop - start, width] among the `count` tokens from `at` on, as many as `slice_tokens` gave:
        start, stop, both counted from `at`, and features. Frees them if no later token needs them."""
        ...

    @property
    def ready(self) -> bool:
        """True if `encode_piece` has something to compute, False while the item is decoded."""
        ...

    def encode_piece(self, make_room: Callable[[int], None]) -> bool:
        """Computes one piece of the item to encode. Returns True when its features are there.

        Before encoding begins, `make_room` is called with the bytes that it takes at once. Raises the errors of
        `make_room`, and MediaError for an item that cannot be decoded.
        """
        ...

    def close(self) -> None:
        """Frees rows and features; the next item begins anew. Safe at any time, and twice."""
        ...


Result = TypeVar("Result")
Steps: TypeAlias = Generator["ShownPrompt | None", None, Result]
"""A check of a client's request, on the threads that prepare requests: yields media that have to be decoded before the
next step, and None where others may have a turn. Raises RequestError and BadRequestError."""


class Vision(Protocol):
    """The preparation of a model's media. Any thread may use it: nothing here touches MLX."""

    @property
    def sees(self) -> bool:
        """True if the model takes media of some kind."""
        ...

    def check(self, media: "Sequence[Media]") -> None:
        """Raises RequestError if there are media, but no model to take them. Changes nothing."""
        ...

    def markers(self, prompt: str) -> tuple[set[int], str]:
        """Returns the ids that the markers of a prompt name, and the text after the last marker."""
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
        """Returns the tokens of a prompt with media, from the headers of their files; None if it has no marker. First
        yields the media that must be decoded before their tokens are known.

        `bos`: the first text begins a prompt. Stops once there are more than `context_length` tokens. Raises
        RequestError for media that cannot be shown, and when `left`, which is asked before each item, returns True.
        """
        ...

    def join(
        self, before: Sequence[int], media: "Sequence[Media]", after: Sequence[int], left: Callable[[], bool]
    ) -> "Steps[ShownPrompt]":
        """Returns a prompt of ids, all of these media, and ids. Yields and raises as `expand` does."""
        ...

    def decode(self, prompt: "ShownPrompt", left: Callable[[], bool]) -> Iterator[Future[None]]:
        """Yields the items that were never decoded, each being decoded from then on. Keeps their rows for the engine,
        while there is room. A future raises MediaError for a damaged one, and once `left` returns True."""
        ...

    def drop(self, prompt: "ShownPrompt") -> None:
        """Frees the rows that a request, which has ended, did not come to take."""
        ...


@dataclass(frozen=True)
class NoVision:
    """A model that takes no media."""

    sees: ClassVar[bool] = False
    why: str = ""
    """Empty for a text model."""

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
    """The names of media in the keys of caches. No name is given twice. Any thread may call this."""

    def name_of(self, digest: bytes) -> int:
        """Returns the name of the item with this digest, a negative number, which is given to it if it has none."""
        ...

    def digest_of(self, name: int) -> bytes | None:
        """Returns the digest of the item of this name; None if it is forgotten."""
        ...


class Formats(Protocol):
    """Compiles the formats of requests. Owner: the event loop."""

    def expect(self) -> "Future[Grammar]":
        """Returns the grammar of a request that waits in the queue, for `compile`."""
        ...

    def compile(self, wanted: "Format", grammar: "Future[Grammar]") -> None:
        """Starts to compile; cancel the future to stop. The future raises RequestError for an invalid format."""
        ...

    def replayed(self, vocab_size: int) -> "Grammar":
        """Returns a grammar whose states all stand on a tape. Any thread may call it."""
        ...


_NO_FORMATS = "this runner was built without structured output"


class NoFormats:
    """A runner without structured output: refuses each format."""

    def expect(self) -> "Future[Grammar]":
        return Future()

    def compile(self, wanted: "Format", grammar: "Future[Grammar]") -> None:
        del wanted
        grammar.set_exception(RequestError(_NO_FORMATS))

    def replayed(self, vocab_size: int) -> "Grammar":
        del vocab_size
        raise RequestError(_NO_FORMATS)


class CheckedBody(NamedTuple):
    """A body that can be answered."""

    answer: Callable[[], Awaitable[bytes]]
    """Returns the JSON of the answer. Raises RequestError; cancelled if the client leaves. Owner: the event loop."""
    held_bytes: int
    """The bytes of the body that the answer holds until it is there."""
    shown: "ShownPrompt | None" = None
    """Media to decode before."""


class WingEndpoint(NamedTuple):
    """An endpoint of a model that makes no text, by POST: the server reads and writes for it."""

    most_bytes: int
    """Of a body."""
    check: "Callable[[Sequence[bytes]], Steps[CheckedBody]]"
    """Checks a body, in pieces as it arrived."""


@dataclass(frozen=True)
class EncoderUse:
    """The use of a model that makes no text; empty for one that does. Any thread may read it."""

    makes: str = ""
    """The results that it makes instead, and the endpoint for them."""
    endpoints: Mapping[str, WingEndpoint] = field(default_factory=dict)
    """Path -> endpoint."""
    dimensions: Sequence[int] = ()
    """The sizes to which an embedding may be cut."""

    def refuse_prompts(self) -> None:
        """Raises RequestError for a model that makes no text."""
        if self.makes:
            raise RequestError(f"this model makes {self.makes}, not text", HTTPStatus.NOT_IMPLEMENTED)


class Beside(Protocol):
    """Work beside the requests, a piece between two slices. Owner: the engine thread."""

    name: str
    """For the trace."""

    def pending(self, *, idle: bool) -> bool:
        """Returns True if `advance` has something to do. `idle`: the engine has nothing else to compute."""
        ...

    def advance(self, *, idle: bool, interrupted: Callable[[], bool]) -> None:
        """Does a piece of the work. Raises nothing. Takes no longer than a slice of a prompt, except while the engine
        is `idle` and not `interrupted`."""
        ...


class Tier(Beside, Protocol):
    """A tier of the cache below memory. Whatever goes wrong there, answers go on. Owner: the engine thread."""

    @property
    def patience_s(self) -> float | None:
        """The longest that the engine may wait for a message, in seconds; None: for good."""
        ...

    def add(self, request: "Request") -> None:
        """Queues a request, which waits there while the tier is asked for its prompt."""
        ...

    def keep(self, receive: Callable[[], None]) -> None:
        """Ends all requests, and keeps what memory has. `receive` waits for a message, and handles it."""
        ...
