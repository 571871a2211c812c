"""The ports to wings: ranks, drafts, media, formats, embeddings, and a tier. Owner: the engine thread.

What a request needs of media before it reaches that thread is in `request.py`: `Vision`, `ShownPrompt`."""

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

from protocol.stats import RankCounts

if TYPE_CHECKING:
    import mlx.core as mx

    from protocol import Format
    from runner.engine.guide import Grammar
    from runner.engine.policy import StepLimit
    from runner.engine.request import Request, ShownPrompt
    from runner.sampling.sample import Choice
    from runner.tokenizer import Tokenizer


class Ranks(Protocol):
    """The other processes that compute the same model. Owner: the engine thread."""

    group: "mx.distributed.Group"
    """All ranks, this one among them."""

    def broadcast(self, token: "mx.array") -> "mx.array":
        """Returns the tokens uint32 [B] that rank 0 drew, where `token` is what this one drew. Lazy. All ranks call it
        at the same place."""
        ...

    def least_budget(self, budget_bytes: int) -> int:
        """Returns the memory budget that all ranks can keep, by the leader's measure; called when the weights are
        loaded. `budget_bytes` is this rank's own. On a follower the result means nothing."""
        ...

    def counts(self) -> RankCounts:
        """Returns what the leader knows of all ranks; nothing on a follower."""
        ...

    def await_cause(self, error: BaseException) -> None:
        """Waits a moment for the end of another rank to be noticed, which ends this process, if that may have caused
        this error."""
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
    """True if the present step, which is no round, may dispatch the next forward before it reads its tokens."""

    def try_step(self, limit: "StepLimit | None") -> "Sequence[Choice] | None":
        """Accepts the last round, and runs another one within the limit if that pays and no tokens are drawn. Returns
        the next tokens of each answer; None if a plain step should follow. Without a limit nothing is drafted."""
        ...

    def accept(self, leaving: Collection[int] = (), *, awaiting: bool = False) -> bool:
        """Ends the last round, if it has not ended. The layers stand then after its right tokens, which are recorded
        or, if the batch is `awaiting` masks, will be, except in rows that are `leaving`. Returns False if they have to
        be computed again."""
        ...

    def measures(self, steps: int) -> bool:
        """Returns True if the time of the step of this number should be recorded."""
        ...

    def record_time(self, seconds: float, tokens: int) -> None:
        """Records how long the step took that brought so many tokens, of all answers."""
        ...


Shifted = Callable[[Sequence[int]], AbstractContextManager[None]]
"""Returns a block in which forwards shift the positions of each row of a batch by its own number."""


class PromptMedia(Protocol):
    """The media of one request, on their way into its prompt. Owner: the engine thread."""

    def slice_tokens(self, position: int, most: int) -> int:
        """Returns the tokens of the next forward at `position`: at most `most`, unless it has to hold a whole item.

        It ends before the next item. 0 if the item at `position` has to be encoded first: it becomes the one to
        `encode_piece`, and the features of any other are freed.
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

        Before encoding begins, `make_room` is called with the bytes that it takes at once. Raises what that raises, and
        MediaError for an item that cannot be decoded.
        """
        ...

    def close(self) -> None:
        """Frees rows and features; the next item begins anew. Safe at any time, and twice."""
        ...


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


class EmbeddingSizes(NamedTuple):
    """The sizes of what a model makes of texts. Any thread may read it."""

    full: int
    """The numbers of an embedding."""
    listed: tuple[int, ...]
    """The sizes to which it may be cut; empty if the model names none."""
    towers: frozenset[str]
    """The kinds of media, `image` and `audio`, for which the model has a tower."""
    token_bytes: int
    """What computing takes for each token of a text."""
    least_bytes: int
    """What it takes beside that."""

    def work_bytes(self, tokens: int) -> int:
        """Returns about the bytes that computing the embedding of a text of so many tokens takes."""
        return self.least_bytes + tokens * self.token_bytes


@dataclass(eq=False)
class TextToEmbed:
    """A text, as tokens with those that begin and end it. Made off the engine thread; whoever waits may cancel it."""

    tokens: list[int]
    shown: "ShownPrompt | None" = None
    """The same text, with its media."""
    asked: object = None
    """What is asked about the text, in the form of a `Decider`; None for its embedding."""
    found: "Future[list[float]]" = field(default_factory=Future)
    """Its embedding, or the scores of its options. Raises RequestError if it cannot be computed."""


class Embedder(Protocol):
    """Makes embeddings of texts and their media. Owner: the engine thread, but for `sizes` and `refusal`."""

    sizes: EmbeddingSizes

    def refusal(self, tokens: int) -> str:
        """Returns why a text of so many tokens cannot be computed; empty if it can. Any thread may call this."""
        ...

    def add(self, text: TextToEmbed) -> None:
        """Queues a text."""
        ...

    @property
    def pending(self) -> bool:
        """True if there is something to compute."""
        ...

    def advance(self) -> None:
        """Computes about as much as a slice of a prompt is. Raises nothing for a fault of a text."""
        ...


class Decision(NamedTuple):
    """A text, and the numbers of options of what is asked about it: each has as many scores."""

    text: TextToEmbed
    options: Sequence[int]


class Decider(Protocol):
    """Reads bodies of `POST /v1/score` for a model that decides by a head of its own. Any thread may call it."""

    counts_cached: bool
    """True if answers count tokens that were restored."""

    def read(self, body: bytes, tokenizer: "Tokenizer") -> Iterator[Decision | None]:
        """Yields the texts of a request, and None where others may have a turn. Raises BadRequestError, and
        RequestError in the words that hosts know."""
        ...


class Tier(Protocol):
    """A tier of the cache below memory. Whatever goes wrong there, answers go on. Owner: the engine thread."""

    @property
    def patience_s(self) -> float | None:
        """The longest that the engine may wait for a message, in seconds; None: for good."""
        ...

    def add(self, request: "Request") -> None:
        """Queues a request, which waits there while the tier is asked for its prompt."""
        ...

    def pending(self, *, idle: bool) -> bool:
        """Returns True if `advance` has something to do. `idle`: the engine has nothing else to compute."""
        ...

    def advance(self, *, idle: bool, interrupted: Callable[[], bool]) -> None:
        """Does a piece of that, of a few milliseconds at most."""
        ...

    def keep(self, receive: Callable[[], None]) -> None:
        """Ends all requests, and keeps what memory has. `receive` waits for a message, and handles it."""
        ...
