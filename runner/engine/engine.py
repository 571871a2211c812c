"""The engine thread, which owns MLX: the thread loads the model, then computes requests one slice at a time. Also the
world around it: the source of every outside value on which the engine's decisions depend."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

from runner.engine.events import Outbox, Wakeup
from runner.engine.ports import EncoderUse
from runner.engine.request import Limits, Request
from runner.errors import ModelError, RunnerError, no_mlx
from runner.logs import Log, die
from runner.model import OpenedModel
from runner.settings import Settings
from runner.tokenizer import Tokenizer
from runner.trace import TRACE

if TYPE_CHECKING:
    from runner.engine.generation import Forward
    from runner.engine.parts import Parts, Post
    from runner.engine.ports import Ranks
    from runner.model.weights.loading import LoadedModel

Answer = TypeVar("Answer")
Message = Request | Callable[[], None] | None
"""A request to compute, a function to call between two slices, or None, which only wakes the engine."""

log = Log(__name__)
_MASK_POLL_S = 0.002  # between two looks for a grammar's mask, while the engine has nothing else to do
_PUBLISH_S = 0.02  # between two readings of MLX's memory: one costs a percent of a short step


class Turns:
    """The turns between slices, in which messages from outside arrive. This class, for an engine without a tape, leaves
    everything to the mailbox."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        """The outbox of the engine."""

    def queue(self, add: Callable[[Request], None]) -> Callable[[Request], None]:
        """Returns the function that gets each request from the mailbox: here `add`, which queues the request."""
        return add

    def begin_slice(self, add: Callable[[Request], None]) -> None:
        """Applies the outside events since the last slice. `add` queues a request."""

    def end_slice(self, *, idle: bool) -> None:
        """Ends a slice, or the start of the engine. The process of an `idle` engine may be ended at any moment."""


class World:
    """The real machine, on which this process computes the whole model. Two classes derive from this one: a tape notes
    the values or replaces them by noted values (`runner/tape`); ranks use the leader's values (`runner/ranks`)."""

    ranks: "Ranks | None" = None
    """The processes that compute the model together. None if this process computes all of the model."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def machine(self, total_bytes: int, budget_bytes: int) -> tuple[int, int]:
        """Returns the bytes of the machine's memory and of the budget for MLX. Called before the weights are loaded."""
        return total_bytes, budget_bytes

    def load(self, model: OpenedModel, dtype: str, budget_bytes: int) -> "LoadedModel":
        """Loads the model, or this process's part of the model. Raises ModelError."""
        from runner.model.weights.loading import load

        return load(model, dtype, budget_bytes)

    def loaded(self, parts: "Parts") -> None:
        """Replaces the memory sizes and the forward, after the weights are loaded. Raises RankError if a rank has
        ended."""

    def forward(self, run: "Forward") -> "Forward":
        """Returns the forward to call in place of `run`."""
        return run

    def wrap(self, parts: "Parts") -> None:
        """Replaces all parts through which outside values reach the engine while it computes."""


class Build(Protocol):
    """The functions that build an engine (runner/build.py). Called on the engine thread."""

    def open_world(self, settings: Settings, model: OpenedModel, outbox: Outbox) -> World:
        """Returns the world for an engine with these settings. Raises RunnerError."""
        ...

    def build_parts(
        self,
        settings: Settings,
        model: OpenedModel,
        opening: Future[Tokenizer],
        started_s: float,
        post: "Post",
        world: World,
    ) -> "Parts":
        """Loads the model and builds an engine around it. Raises ModelError."""
        ...


class Engine:
    """The engine as the event loop sees it, and the thread behind it.

    `start`, `submit` and `compile` belong to the event loop. Any thread may read `memory_bytes`. Every name that begins
    with an underscore belongs to the engine thread. Requests begin in the order of their arrival.
    """

    tokenizer: Tokenizer
    """The model's tokenizer. Set once requests can be computed."""
    memory_bytes: int = 0
    """The bytes that MLX held at the engine's last reading: bytes in use, and bytes kept for reuse."""
    encoder_use = EncoderUse()
    """The use of a model that makes no text. Set, for such a model, once requests can be computed."""
    refused: int = 0
    """The number of requests that were refused before they reached the engine. Owner: the event loop."""
    failed: int = 0
    """The number of requests that failed before they reached the engine. Owner: the event loop."""
    parts: "Parts"
    """The parts of the engine. Only the engine thread may use them, except `tokenizer`, `vision` and `formats`."""

    def __init__(
        self,
        settings: Settings,
        model: OpenedModel,
        tokenizer: Future[Tokenizer],
        build: Build,
        refuse: Callable[[ModelError], NoReturn] = die,
    ) -> None:
        """`tokenizer` may still be opening: opening a large tokenizer takes as long as reading many weights.

        `refuse` ends the process when the model cannot be loaded. Any thread may call `refuse`.
        """
        self._settings = settings
        self._model = model
        self._opening = tokenizer
        self._build = build
        self._refuse = refuse
        self.limits = Limits(model.context_length, model.vocab_size)
        self._mailbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._world: World | None = None
        # Valid until the next slice.
        self._idle = True  # there is nothing to compute
        self._publish_at = 0.0

    def start(self, loop: asyncio.AbstractEventLoop) -> asyncio.Event:
        """Starts to load. Returns an event that is set when requests can be computed. A fault before ends the
        process."""
        self._ready = asyncio.Event()
        self._outbox = Outbox(loop, Wakeup(loop).wake)
        self._opening.add_done_callback(self._check_tokenizer)
        threading.Thread(target=self._run, args=(loop,), name="engine", daemon=True).start()
        return self._ready

    def submit(self, request: Request) -> None:
        """Queues a request. The engine puts the request's events into the request's stream."""
        if request.format is not None:
            request.grammar = self.parts.formats.expect()
            request.grammar.add_done_callback(lambda _: self._mailbox.put(None))
        self._mailbox.put(request)

    def compile(self, request: Request) -> None:
        """Starts to compile the format of a request that has left the queue. Before that, a format takes no memory."""
        if request.format is not None and request.grammar is not None:
            self.parts.formats.compile(request.format, request.grammar)

    def keep(self) -> threading.Event:
        """Ends all requests and writes their conversations to the disk cache. Returns an event that is set afterwards.
        Later messages wait until then."""
        kept = threading.Event()
        self._mailbox.put(lambda: self._keep(kept))
        return kept

    async def ask(self, question: "Callable[[Parts], Answer]") -> Answer:
        """Calls `question` with the engine's parts, on the engine thread between two slices. Returns the result."""
        answer: Future[Answer] = Future()
        self._mailbox.put(lambda: _resolve(answer, lambda: question(self.parts)))
        return await asyncio.wrap_future(answer)

    def _check_tokenizer(self, opening: Future[Tokenizer]) -> None:
        """Reports a broken tokenizer as soon as it is opened, before gigabytes of weights have been read."""
        error = opening.exception()
        if isinstance(error, ModelError):
            self._refuse(error)
        if error is not None:
            die(error)

    # --- on the engine thread

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._load()
            self.parts.warm_up()
            loop.call_soon_threadsafe(self._ready.set)
            self._turns.end_slice(idle=True)
            while True:
                self._step()
        except ModelError as error:
            self._await_cause(error)
            self._refuse(error)
        except RunnerError as error:
            self._await_cause(error)
            die(error)
        except BaseException as error:  # without its engine the process would be useless
            log.exception("the engine died")
            self._await_cause(error)
            die(error, before="the engine died: ")

    def _await_cause(self, error: BaseException) -> None:
        if self._world is not None and self._world.ranks is not None:
            self._world.ranks.await_cause(error)

    def _load(self) -> None:
        started = perf_counter()
        if self._settings.trace is not None:
            TRACE.start(self._settings.trace)
        try:
            import mlx.core as mx  # alone in the block, so that only a missing MLX is reported as `no_mlx`
        except ImportError as error:
            raise no_mlx(error) from error
        self._world = world = self._build.open_world(self._settings, self._model, self._outbox)
        self._turns = world.turns
        self._outbox = world.turns.outbox
        rest = (started, self._mailbox.put, world)
        self.parts = self._build.build_parts(self._settings, self._model, self._opening, *rest)
        gpus = 0 if self.parts.on_cpu else mx.device_count(mx.gpu)
        self.limits = self.limits.on_gpus(gpus * self.parts.total_bytes)
        self._add = self._turns.queue((self.parts.disk or self.parts.scheduler).add)
        self.tokenizer = self.parts.tokenizer
        self.vision = self.parts.vision
        self.encoder_use = self.parts.encoder_use
        self._publish()

    def _step(self) -> None:
        """Receives messages, chooses and computes one slice, and delivers its events."""
        self._receive()
        if TRACE.on:
            TRACE.begin()
        self._compute()
        self._deliver()
        if TRACE.on:
            TRACE.lap("hand over")
            TRACE.end()

    def _receive(self) -> None:
        """Handles all messages. Waits for a message only if there is nothing to compute."""
        if self._idle:
            TRACE.flush()
            self._handle(self._wait())
        while not self._mailbox.empty():
            self._handle(self._mailbox.get())

    def _wait(self) -> Message:
        """Returns the next message. Returns None if it is time to look for a mask, or for work of the disk cache."""
        disk = self.parts.disk
        patience_s = disk.patience_s if disk is not None else None
        with suppress(queue.Empty):
            return self._mailbox.get(timeout=_MASK_POLL_S if self.parts.scheduler.awaits_mask else patience_s)
        return None

    def _compute(self) -> None:
        """Computes a slice, then a piece of each work beside it."""
        scheduler, beside = self.parts.scheduler, self.parts.beside
        self._turns.begin_slice(scheduler.add)
        scheduler.compute_slice()
        self._idle = scheduler.idle
        self._turns.end_slice(idle=self._idle)
        for each in beside:
            if each.pending(idle=self._idle):
                each.advance(idle=self._idle, interrupted=lambda: not self._mailbox.empty())
                TRACE.lap(each.name)
                self._idle = scheduler.idle
        self._idle = self._idle and not any(each.pending(idle=True) for each in beside)

    def _deliver(self) -> None:
        """Publishes the memory in use if that is due, and sends the events to the event loop."""
        if self._idle or perf_counter() >= self._publish_at:
            self._publish()
            if TRACE.on:
                TRACE.lap("publish")
        self._outbox.send()

    def _handle(self, message: Message) -> None:
        if isinstance(message, Request):
            self._add(message)
        elif message is not None:
            message()

    def _keep(self, kept: threading.Event) -> None:
        if self.parts.disk is not None:
            self.parts.disk.keep(self._receive_call)
        kept.set()

    def _receive_call(self) -> None:
        """Waits for a message and handles it. Ignores a request: there is no time left to compute one."""
        message = self._mailbox.get()
        if message is not None and not isinstance(message, Request):
            message()

    def _publish(self) -> None:
        self._publish_at = perf_counter() + _PUBLISH_S
        self.memory_bytes = sum(self.parts.held_bytes)


def _resolve(answer: Future[Answer], function: Callable[[], Answer]) -> None:
    if answer.set_running_or_notify_cancel():
        try:
            answer.set_result(function())
        except Exception as error:  # the caller of `ask` gets the error
            answer.set_exception(error)
