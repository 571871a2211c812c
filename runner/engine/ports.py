"""The ports to wings: ranks, drafts, media, formats, embeddings, and a tier. Owner: the engine thread.

What a request needs of media before it reaches that thread is in `request.py`: `Vision`, `ShownPrompt`."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

from protocol.stats import RankCounts
from runner.engine.policy import UNLIMITED, StepLimit

if TYPE_CHECKING:
    import mlx.core as mx

    from protocol import Format
    from runner.cache.session import Session
    from runner.engine.answer_grammar import Grammar
    from runner.engine.lifecycle import Lifecycle
    from runner.engine.request import Request, ShownPrompt
    from runner.sampling.sampler import Sampler
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
    """Proposes tokens of one answer. No call changes the session or the sampler, and none raises. Owner: the engine
    thread."""

    shared: "Drafts"
    """What it shares with others, by which answers of one forward are drafted together."""
    every: int
    """It looks for drafts in each step whose number is a multiple of this power of two."""

    def index(self, tokens: int) -> None:
        """Indexes the next `tokens` prompt tokens (about 1 µs each)."""
        ...

    def record_outcome(self, drafts: int, right: int, life: "Lifecycle") -> None:
        """Records how many drafts of a round were right, of at least one. Counts those that a model made in `life`, the
        answer's."""
        ...

    def close(self) -> None:
        """Ends the answer."""
        ...


class DraftedAnswer(NamedTuple):
    """An answer of a forward for which tokens may be drafted."""

    drafter: Drafter
    session: "Session"
    most: int
    """The most drafts that it may have, at least one."""
    sampler: "Sampler"
    row: int
    """Its row in the forward."""
    position: int
    """The tokens that the layers of the forward have seen of it."""


class Drafts(Protocol):
    """What all drafted answers of an engine share. Owner: the engine thread."""

    skips_padding: bool
    """True if a round of several answers should compute no padding, where it can leave it out."""

    @property
    def measuring(self) -> int:
        """The number of next steps whose time should be recorded: those with drafts at hand, and the one after them."""
        ...

    def drafter(self, prompt: Sequence[int]) -> Drafter:
        """Returns a drafter for the answer to this prompt, whose media stand in it by their names."""
        ...

    def look(self, answers: Sequence[tuple[Drafter, "Session"]], step: int) -> bool:
        """Looks for drafts for those answers of a forward whose drafters do so in this step. Returns False if there are
        none: the usual case where no text repeats, and a cheap one. Call it before `expects` or `propose`."""
        ...

    def expects(self, answers: Sequence[DraftedAnswer], together: int, limit: StepLimit = UNLIMITED) -> bool:
        """Returns True if a round within the limit should follow the tokens that are on their way, which are not
        recorded yet. Nothing is dispatched before it then. The forward is over `together` answers, these among them."""
        ...

    def propose(
        self, answers: Sequence[DraftedAnswer], together: int, layers: Sequence[object], limit: StepLimit = UNLIMITED
    ) -> Sequence[Sequence[int]]:
        """Returns for each answer tokens that may follow its prompt and what there is of it, for a round within the
        limit. `layers` are those of the forward."""
        ...

    def record_time(self, drafters: Sequence[Drafter], step: "StepTime") -> None:
        """Records how long a step took, given the drafters of its answers."""
        ...


class StepTime(NamedTuple):
    """How long a step took."""

    seconds: float
    tokens: int
    """Those that it brought, of all answers."""
    together: int
    """The number of answers in it."""
    length: int
    """The positions of each answer in its forward, with padding; 0 if it had none, -1 if it had several."""
    asked: float
    """Those that are no padding if that is skipped, on average."""
    steps: int = 1
    """The steps since the last one that was recorded, this one included; the others were plain."""


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

    def replayed(self, vocab_size: int) -> "Grammar":
        """Returns a grammar whose states all stand on a tape. Any thread may call it."""
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
