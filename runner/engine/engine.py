"""The one thread that owns MLX: it loads the model, then computes requests one slice at a time."""

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec

from runner.cache import PrefixCache, make_cache
from runner.engine.bell import Bell
from runner.engine.core import OneCore, keep_together
from runner.engine.events import Outbox
from runner.engine.request import Limits, Request
from runner.engine.schedule import Schedule
from runner.engine.trace import TRACE
from runner.errors import RunnerError, no_mlx
from runner.logs import Log, fatal, told
from runner.model import OpenedModel
from runner.settings import CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS, Settings
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runner.engine.running import Running

log = Log(__name__)
_WARM_BYTES = 256 << 20  # on a CPU: a larger model's own forwards take so long that the first one's extra is nothing
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
    _running: "Running"

    def __init__(self, settings: Settings, model: OpenedModel, tokenizer: Future[Tokenizer]) -> None:
        """`tokenizer` may still be on its way: a large one takes as long to open as many weights to read."""
        self.numbers = Numbers()
        self._settings = settings
        self._model = model
        self._opening = tokenizer
        self.limits = Limits(model.context_length, model.vocab_size)
        self._mailbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._core: OneCore | None = None
        self._publish_at = 0.0
        self._warm_up: Callable[[], None] = lambda: None

    def start(self, loop: asyncio.AbstractEventLoop) -> asyncio.Event:
        """Begin to load. The event is set when requests can be computed; a fault until then ends the process."""
        self._ready = asyncio.Event()
        self._outbox = Outbox(loop, Bell(loop).wake)
        self._opening.add_done_callback(_die_of_a_fault)
        threading.Thread(target=self._live, args=(loop,), name="engine", daemon=True).start()
        return self._ready

    def submit(self, request: Request) -> None:
        """Queue a request; its stream tells what becomes of it."""
        self._mailbox.put(request)
        if request.grammar is not None:
            request.grammar.add_done_callback(lambda _: self._mailbox.put(None))

    def _live(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._load()
            loop.call_soon_threadsafe(self._ready.set)
            self._warm_up()  # hosts ask for the status, and then take a moment to ask for more
            while True:
                self._step()
        except RunnerError as error:
            fatal(str(error))
        except BaseException as error:  # without its engine the process would be a zombie: end it, and say why
            log.exception("the engine died")
            fatal(f"the engine died: {told(error)}")

    def _step(self) -> None:
        """One slice, and what the others want to know of it."""
        self._receive()
        TRACE.begin()
        if self._core is not None:
            self._core.work()
        self._running.advance()
        if self._running.idle or perf_counter() >= self._publish_at:
            self._publish()
            TRACE.lap("publish")
        self._outbox.send()
        TRACE.lap("hand over")
        TRACE.end()

    def _load(self) -> None:
        started = perf_counter()
        if self._settings.trace is not None:
            TRACE.start(self._settings.trace)
        try:
            import mlx.core as mx
        except ImportError as error:
            raise no_mlx(error) from error

        from runner.cache.layers.trial import find_fault
        from runner.engine.means import Means
        from runner.engine.running import Running
        from runner.engine.warm import warm_up
        from runner.model.dtype import device
        from runner.model.load import load

        self._mx = mx
        on_cpu = device() == "cpu"
        if on_cpu:
            if self._settings.one_core:
                self._core = keep_together(lambda: mx.eval(mx.zeros(1)))
            mx.disable_compile()  # every fused kernel would cost a run of g++, and gains nothing on CPUs
        elif limit := mx.device_info().get("max_recommended_working_set_size"):
            mx.set_wired_limit(int(limit))  # Metal would page a large model's weights out between two requests
        loaded = load(self._model, self._settings.dtype)
        self.tokenizer = self._opening.result()
        make_layers, salt = loaded.make_layers, ""
        if self._settings.kv_bits is not None:
            from runner.cache.layers.quantized import find_format

            make_layers, salt = find_format(
                loaded.make_layers, loaded.logits, self.limits.vocab_size, self._settings.kv_bits
            )
        device_bytes = _device_bytes(mx.device_info(), mx.get_memory_limit())
        cache_bytes = self._settings.cache_memory.bytes_of(device_bytes)
        chunk = self._settings.prefill_chunk_tokens or (CPU_CHUNK_TOKENS if on_cpu else GPU_CHUNK_TOKENS)

        def new_cache() -> PrefixCache:
            special = self.tokenizer.special
            return make_cache(self._settings.cache, make_layers, budget_bytes=cache_bytes, turn_tokens=special)

        if not on_cpu or self._model.total_bytes <= _WARM_BYTES:
            limits = self.limits
            self._warm_up = lambda: warm_up(make_layers, loaded.logits, limits.vocab_size, limits.context_length)
        means = Means(
            loaded.logits,
            self.tokenizer,
            self.limits.context_length,
            new_cache,
            salt,
            find_fault=lambda: loaded.solitary or find_fault(make_layers, loaded.logits, self.limits.vocab_size),
            room_bytes=device_bytes - mx.get_active_memory(),
        )
        self._running = Running(means, Schedule(chunk, self._settings.max_gap_s), self._settings.parallel, self._outbox)
        self._publish()
        log.info(
            "model loaded",
            model=self._model.name,
            architecture=self._model.architecture,
            bytes=self._model.total_bytes,
            seconds=round(perf_counter() - started, 3),
            device=device(),
            context=self.limits.context_length,
            cache=self._settings.cache,
            cache_bytes=cache_bytes,
            parallel=self._running.places,
        )

    def _receive(self) -> None:
        """Take what arrived; waits only when there is nothing to do."""
        if self._running.idle:
            TRACE.flush()
            if self._core is not None:
                self._core.rest()
            self._accept(self._mailbox.get())
        while not self._mailbox.empty():
            self._accept(self._mailbox.get())

    def _accept(self, request: Request | None) -> None:
        """None stands for something else that has happened: a grammar is compiled."""
        if request is not None:
            self._running.add(request)

    def _publish(self) -> None:
        self._publish_at = perf_counter() + _PUBLISH_S
        self.numbers = Numbers(memory_bytes=self._mx.get_active_memory() + self._mx.get_cache_memory())


def _device_bytes(info: Mapping[str, str | int], limit_bytes: int) -> int:
    """The memory that the device lends: what Metal recommends, what a GPU has, else MLX's own limit."""
    return int(info.get("max_recommended_working_set_size") or info.get("total_memory") or limit_bytes)


def _die_of_a_fault(opening: Future[Tokenizer]) -> None:
    """A broken tokenizer is told at once, not when gigabytes have been read."""
    error = opening.exception()
    if error is not None:
        fatal(str(error) if isinstance(error, RunnerError) else told(error))
