"""The ports to wings: tape, ranks, drafts, pictures, formats, and a tier. Owner: the engine thread.

What a request needs of pictures before it reaches that thread is in `request.py`: `Vision`, `ShownPrompt`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

from protocol.stats import RankCounts

if TYPE_CHECKING:
    from concurrent.futures import Future

    import mlx.core as mx

    from protocol import Format
    from runner.cache.session import Session
    from runner.engine.guide import Grammar
    from runner.engine.lifecycle import Lifecycle
    from runner.engine.request import Request
    from runner.sampling.sampler import Sampler

Value = None | bool | int | float | str | bytes | list["Value"]
"""What can stand on a tape."""
Read = TypeVar("Read", bound=Value)


class What(IntEnum):
    """The kinds of value on a tape. A number keeps its meaning as long as the version of the format stays."""

    TURN = 0
    """What happened outside before a slice: a `Turn`, or nothing."""
    SECONDS = 2
    """The time that a slice or a step took, or a clock."""
    ACTIVE = 3
    """The bytes that MLX has in use."""
    PEAK = 4
    """The most bytes that it had."""
    GRAMMAR_BYTES = 5
    """The bytes that grammars take."""
    MACHINE = 6
    """The bytes of the memory, of the budget, or of what may be kept for reuse."""
    FAULT = 7
    """The exception that a computation raised, or nothing."""
    GRAMMAR = 8
    """Why a grammar could not be followed, or nothing."""
    STATE = 9
    """The next state of a grammar, or nothing if it is late."""
    TOKENS = 10
    """The number of a request, and its next tokens."""
    EVENT = 11
    """The number of a request, and what its client is told."""
    ENDED = 12
    """The number of a request, its outcome, and its counts."""
    FORWARD = 13
    """Between ranks: the shape of the tokens of a forward, and the position that it begins at."""

    @property
    def label(self) -> str:
        """The kind in words."""
        return self.name.lower().replace("_", " ")


class Tape(Protocol):
    """Takes every value from outside, or gives those that were taken. Owner: the engine thread."""

    def of(self, what: What, make: Callable[[], Read]) -> Read:
        """Returns what `make` returns, which must not raise; in a replay, what it returned when it was recorded."""
        ...

    def same(self, what: What, value: Value) -> None:
        """Notes a value that follows from those before it; in a replay, it must be the one that was noted."""
        ...

    def fault(self, met: list[Value] | None) -> list[Value] | None:
        """Returns the fault that struck a computation, type and text, which is `met` or nothing; in a replay, the one
        that struck when it was recorded."""
        ...

    def flush(self) -> None:
        """Lets go of everything so far, in one write. Called before every forward: it may never come back."""
        ...


class Ranks(Protocol):
    """The other processes that compute the same model. Owner: the engine thread."""

    group: "mx.distributed.Group"
    """All ranks, this one among them."""

    def agree(self, token: "mx.array") -> "mx.array":
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

    def index(self, tokens: int) -> None:
        """Indexes the next `tokens` prompt tokens (about 1 µs each)."""
        ...

    def expects(self, session: "Session", most: int) -> bool:
        """Returns True if a round should follow the token that is on its way, which is not recorded yet. Nothing is
        dispatched before it then."""
        ...

    def propose(self, session: "Session", most: int, sampler: "Sampler") -> Sequence[int]:
        """Returns at most `most` tokens that may follow the prompt and the answer so far."""
        ...

    def record_outcome(self, drafts: int, right: int, life: "Lifecycle") -> None:
        """Records how many drafts of a round were right. Counts those that a model made in `life`, the answer's."""
        ...

    def record_time(self, tokens: int, rows: int, seconds: float) -> None:
        """Records how long a step of `tokens` tokens took. `rows` is the length of its forward; 0 if it had none, -1
        if it had several."""
        ...

    def close(self) -> None:
        """Ends the answer."""
        ...


class Drafts(Protocol):
    """What all drafted answers of an engine share. Owner: the engine thread."""

    def drafter(self, prompt: Sequence[int]) -> Drafter:
        """Returns a drafter for the answer to this prompt, whose pictures stand in it by their names."""
        ...


Shifted = Callable[[Sequence[int]], AbstractContextManager[None]]
"""Returns a block in which forwards shift the positions of each row of a batch by its own number."""


class Pictures(Protocol):
    """The pictures of one request, on their way into its prompt. Owner: the engine thread."""

    def slice_tokens(self, position: int, most: int) -> int:
        """Returns the tokens of the next forward at `position`: at most `most`, unless it has to hold a whole picture.

        It ends before the next picture. 0 if the picture at `position` has to be encoded first: it becomes the one to
        `advance`, and the features of any other are freed.
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

    @property
    def ready(self) -> bool:
        """True if `advance` has something to compute, False while pixels are decoded."""
        ...

    def advance(self, make_room: Callable[[int], None]) -> bool:
        """Computes one piece of the picture to encode. Returns True when its features are there.

        Before encoding begins, `make_room` is called with the bytes that it takes at once. Raises what that raises, and
        MediaError for pixels that cannot be decoded.
        """
        ...

    def close(self) -> None:
        """Frees pixels and features; the next picture begins anew. Safe at any time, and twice."""
        ...


class Names(Protocol):
    """The names of pictures in the keys of caches. No name is given twice. Any thread may call this."""

    def name_of(self, digest: bytes) -> int:
        """Returns the name of the picture with this digest, a negative number, which is given to it if it has none."""
        ...

    def digest_of(self, name: int) -> bytes | None:
        """Returns the digest of the picture of this name; None if it is forgotten."""
        ...


class Formats(Protocol):
    """Compiles the formats of requests. Owner: the event loop."""

    def expect(self) -> "Future[Grammar]":
        """Returns the grammar of a request that waits in the queue, for `compile`."""
        ...

    def compile(self, wanted: "Format", grammar: "Future[Grammar]") -> None:
        """Starts to compile; cancel the future to stop. The future raises RequestError for an invalid format."""
        ...


class Tier(Protocol):
    """A tier of the cache behind memory. Whatever goes wrong there, answers go on. Owner: the engine thread."""

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
