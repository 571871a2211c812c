"""The one thread that owns MLX: it loads the model, then computes requests one slice at a time."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec

from protocol.stats import CacheNode
from runner import __version__
from runner.cache import Cache, make_cache
from runner.engine.events import Outbox
from runner.engine.formats import Formats
from runner.engine.platform.wakeup import Wakeup
from runner.engine.policy import SlicePolicy
from runner.engine.request import Limits, Request
from runner.engine.trace import TRACE
from runner.errors import ComputeError, ModelError, RunnerError, no_mlx
from runner.logs import Log, die, fatal, told
from runner.model import OpenedModel
from runner.settings import CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS, Settings
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runner.engine.observe.counters import Published
    from runner.engine.report import Report
    from runner.engine.scheduler import Scheduler

Answer = TypeVar("Answer")
log = Log(__name__)
_WARM_BYTES = 256 << 20  # on a CPU: a larger model's own forwards take so long that the first one's extra is nothing
_EXPECTANT_S = 0.002  # between two looks at whether a mask is there, when there is nothing else to do
_QUIET_S = 0.25  # a host asks for the status every 100 ms, and then brings the request for which it loads the model
_PUBLISH_S = 0.02  # a decode step may take a millisecond or two, of which asking MLX for its memory would be a percent


class Numbers(msgspec.Struct, frozen=True):
    """What the engine last published about itself: bytes that MLX holds, in use and kept for reuse."""

    memory_bytes: int = 0


class Engine:
    """The engine's face towards the event loop, and the thread behind it.

    `start` and `submit` are the event loop's; `numbers` may be read from anywhere; what begins with an underscore
    runs on the engine thread. Requests begin in the order of their arrival.
    """

    tokenizer: Tokenizer
    """There once requests can be computed."""
    _running: "Scheduler"
    _survey: "Report"

    def __init__(
        self,
        settings: Settings,
        model: OpenedModel,
        tokenizer: Future[Tokenizer],
        refuse: Callable[[ModelError], NoReturn] = die,
    ) -> None:
        """`tokenizer` may still be on its way: a large one takes as long to open as many weights to read.

        `refuse` ends the process, on any thread, when the model cannot be loaded.
        """
        self.numbers = Numbers()
        self._settings = settings
        self._model = model
        self._opening = tokenizer
        self._refuse = refuse
        self.limits = Limits(model.context_length, model.vocab_size)
        self._mailbox: queue.SimpleQueue[Request | Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = True  # until a message comes, there is nothing to do but to wait for it
        self._publish_at = 0.0

    def start(self, loop: asyncio.AbstractEventLoop) -> asyncio.Event:
        """Begin to load. The event is set when requests can be computed; a fault until then ends the process."""
        self._ready = asyncio.Event()
        self._outbox = Outbox(loop, Wakeup(loop).wake)
        self._opening.add_done_callback(self._check_tokenizer)
        threading.Thread(target=self._live, args=(loop,), name="engine", daemon=True).start()
        return self._ready

    def submit(self, request: Request) -> None:
        """Queue a request; its stream tells what becomes of it. What it has to follow is compiled meanwhile."""
        if request.format is not None:
            request.grammar = self._formats.compile(request.format)
        self._mailbox.put(request)
        if request.grammar is not None:
            request.grammar.add_done_callback(lambda _: self._mailbox.put(None))

    async def published(self) -> "Published":
        """All that it counts, as of between two slices. Costs the engine some tens of microseconds."""
        return await self._ask(lambda: self._survey.publish())

    async def cache_nodes(self) -> list[CacheNode]:
        """What the cache holds, node by node, as of between two slices. A node of many layers takes some microseconds
        of the engine's time."""
        return await self._ask(lambda: self._survey.nodes())

    def _ask(self, question: Callable[[], Answer]) -> "asyncio.Future[Answer]":
        """Have the engine's thread answer this between two slices."""
        answer: Future[Answer] = Future()
        self._mailbox.put(lambda: _answer(question, answer))
        return asyncio.wrap_future(answer)

    def _check_tokenizer(self, opening: Future[Tokenizer]) -> None:
        """A broken tokenizer is told at once, not when gigabytes have been read."""
        error = opening.exception()
        if isinstance(error, ModelError):
            self._refuse(error)
        if isinstance(error, RunnerError):
            die(error)
        if error is not None:
            fatal(told(error))

    def _live(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._load()
            self._warm_up()
            loop.call_soon_threadsafe(self._ready.set)
            while (
                self._on_gpu and self._running.matching.untried
            ):  # hosts take a moment to ask for more than the status
                self._running.matching.advance()
            while True:
                self._step()
        except ComputeError as error:
            self._refuse(error)
        except RunnerError as error:
            die(error)
        except BaseException as error:  # without its engine the process would be a zombie: end it, and say why
            log.exception("the engine died")
            fatal(f"the engine died: {told(error)}")

    def _step(self) -> None:
        """One slice, and what the others want to know of it."""
        self._receive()
        if TRACE.on:
            TRACE.begin()
        self._running.advance()
        self._idle = self._running.idle
        if self._idle or perf_counter() >= self._publish_at:
            self._publish()
            if TRACE.on:
                TRACE.lap("publish")
        self._outbox.send()
        if TRACE.on:
            TRACE.lap("hand over")
            TRACE.end()

    def _load(self) -> None:
        started = perf_counter()
        settings, model = self._settings, self._model
        if settings.trace is not None:
            TRACE.start(settings.trace)
        try:
            import mlx.core as mx
        except ImportError as error:
            raise no_mlx(error) from error

        from runner.cache.layers.batch_trial import BatchTrial
        from runner.engine.context import EngineContext, SettledTrial
        from runner.engine.memory.budget import MemoryBudget, MLXMeter, set_limits
        from runner.engine.platform.warmup import sketch, warm_up
        from runner.engine.report import About, Report
        from runner.engine.scheduler import Scheduler
        from runner.model.device import gpu_usable_bytes, usable_bytes
        from runner.model.weights.dtype import device
        from runner.model.weights.load import load

        self._mx = mx
        self._on_gpu = not (on_cpu := device() == "cpu")
        if on_cpu:
            mx.disable_compile()  # every fused kernel would cost a run of g++, and gains nothing on CPUs
        budget_bytes = settings.memory.bytes_of(usable_bytes())
        whole_bytes = gpu_usable_bytes(mx.device_info(), mx.get_memory_limit())
        if not on_cpu and mx.metal.is_available():
            mx.set_wired_limit(min(whole_bytes, budget_bytes))  # lest weights are paged out between two requests
        try:
            loaded = load(model, settings.dtype, budget_bytes)
            self.tokenizer = self._opening.result()
        except ModelError as error:
            self._refuse(error)
        make_layers, salt = loaded.make_layers, ""
        if settings.kv_bits is not None:
            from runner.cache.layers.quantized_trial import find_format

            make_layers, salt = find_format(loaded.make_layers, loaded.logits, self.limits.vocab_size, settings.kv_bits)
        cache_bytes = settings.cache_memory.bytes_of(whole_bytes)
        chunk = settings.prefill_chunk_tokens or (CPU_CHUNK_TOKENS if on_cpu else GPU_CHUNK_TOKENS)

        def new_cache() -> Cache:
            special = self.tokenizer.special
            return make_cache(settings.cache, make_layers, budget_bytes=cache_bytes, turn_tokens=special)

        def warm() -> None:
            if not on_cpu:
                log.info("warming up", why="a GPU's kernels are compiled when they are first used, once on a machine")
            large = on_cpu and model.total_bytes > _WARM_BYTES and not loaded.has_16_bit_experts
            compute = sketch if large else warm_up
            compute(make_layers, loaded.logits, self.limits.vocab_size, self.limits.context_length)

        self._warm_up = warm
        vocab_size = self.limits.vocab_size
        trial = (
            SettledTrial(loaded.unbatchable)
            if loaded.unbatchable
            else BatchTrial(make_layers, loaded.logits, vocab_size)
        )
        reuse_bytes = set_limits(budget_bytes, on_cpu=on_cpu)
        shared = on_cpu or mx.metal.is_available()  # one memory for the device and for processes
        room = budget_bytes - mx.get_active_memory()
        self._formats = formats = Formats(model, self.tokenizer, settings.parallel, room)
        means = EngineContext(
            loaded.logits,
            self.tokenizer,
            self.limits.context_length,
            new_cache,
            MemoryBudget(MLXMeter(), budget_bytes, chunk, reuse_bytes, lambda: formats.nbytes if shared else 0),
            salt,
            trial,
        )
        self._running = Scheduler(means, SlicePolicy(chunk, settings.max_gap_s), settings.parallel, self._outbox)
        context = self.limits.context_length
        about = About(__version__, model.name, model.architecture, device(), context, settings.cache)
        self._survey = Report(about, self._running, means.memory, self.tokenizer if settings.inspect_text else None)
        self._publish()
        log.info(
            "model loaded",
            model=model.name,
            architecture=model.architecture,
            bytes=model.total_bytes,
            seconds=round(perf_counter() - started, 3),
            device=device(),
            context=self.limits.context_length,
            cache=settings.cache,
            cache_bytes=cache_bytes,
            memory_bytes=budget_bytes,
            parallel=self._running.places,
        )

    def _receive(self) -> None:
        """Take what arrived; waits only when there is nothing to do."""
        if self._idle:
            TRACE.flush()
            self._accept(self._wait())
        while not self._mailbox.empty():
            self._accept(self._mailbox.get())

    def _wait(self) -> Request | Callable[[], None] | None:
        """The next message. While none comes, there is time to find out what the first answers that run at once would
        else have to wait for."""
        quiet_s = _QUIET_S
        if self._running.expectant:
            with suppress(queue.Empty):
                return self._mailbox.get(timeout=_EXPECTANT_S)
            return None
        while self._running.matching.untried:
            try:
                return self._mailbox.get(timeout=quiet_s)
            except queue.Empty:
                self._running.matching.advance()
                quiet_s = 0.0
        return self._mailbox.get()

    def _accept(self, message: Request | Callable[[], None] | None) -> None:
        """A request, or a question; None stands for something else that has happened: a grammar is compiled."""
        if isinstance(message, Request):
            self._running.add(message)
        elif message is not None:
            message()

    def _publish(self) -> None:
        self._publish_at = perf_counter() + _PUBLISH_S
        self.numbers = Numbers(memory_bytes=self._mx.get_active_memory() + self._mx.get_cache_memory())


def _answer(question: Callable[[], Answer], answer: Future[Answer]) -> None:
    if answer.set_running_or_notify_cancel():
        try:
            answer.set_result(question())
        except Exception as error:  # of whoever asked
            answer.set_exception(error)
