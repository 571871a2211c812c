"""A host's scheduler: loads models when they are asked for, keeps them, evicts them.

See docs/internals/wire.md, 7, 1.7.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Self

import aiohttp

from scripts.tools.host.lib.answers import Status, UndecodableError
from scripts.tools.host.lib.client import Client, Completion, StatusError, StreamError
from scripts.tools.host.lib.generations import F, Generation
from scripts.tools.host.lib.output import is_out_of_memory
from scripts.tools.host.lib.process import POLL_S, Copy, LoadError, Process, spawn
from scripts.tools.host.lib.requests import Request

KEEP_ALIVE_S = 300.0
MAX_LOADED = 3
"""The limit of a host with one GPU."""
PING_S = 10.0
_MEMORY_S = 1.0
_UNKNOWN = Status(0, 0, 0, 0)


class Loaded:
    """One model's runner. Made, counted and closed by its `Host`; a request uses `client` and what it shows."""

    def __init__(self, model: str, process: Process, keep_alive_s: float, num_ctx: int) -> None:
        self.model = model
        self.process = process
        self.client = Client.of(process)
        self.keep_alive_s = keep_alive_s
        self.num_ctx = num_ctx
        self.users = 1
        """Requests that have not ended, the one that loads it among them."""
        self.status = _UNKNOWN
        self.expires_at = math.inf
        """`time.time()` of the end of its keep-alive; infinite while it is used."""
        self.settled = asyncio.Event()
        """It is ready, or it failed."""
        self.unloaded = asyncio.Event()
        self.closing = False
        self.timer: asyncio.TimerHandle | None = None

    @property
    def context_length(self) -> int:
        """The context in `/api/ps`: the smaller of the model's own and that of the first request's `num_ctx`."""
        known = [length for length in (self.status.context_length, self.num_ctx) if length > 0]
        return min(known, default=0)

    async def ping(self, timeout_s: float = PING_S) -> bool:
        """Returns True if it answers in time, and notes the answer."""
        try:
            async with asyncio.timeout(timeout_s):
                self.status = await self.client.ping() or self.status
        except (aiohttp.ClientError, OSError, TimeoutError, StatusError, UndecodableError):
            return False
        return True

    async def memory(self) -> int:
        """The bytes it says it holds; the last known ones if it does not answer within a second."""
        await self.ping(_MEMORY_S)
        return self.status.memory


class Host:
    """Runs one process for each model that is asked for. Belongs to one event loop; an async context manager.

    * The request that comes first loads the model, others wait for it; if its load is cancelled the next one loads.
    * Each later request pings the runner first. One that does not answer is closed, once its requests have ended,
      and loaded again.
    * A runner that is idle for its keep-alive is closed; so is, when `max_loaded` models are loaded and another is
      wanted, the idle one with the shortest keep-alive, or that with the shortest once its requests have ended.
    * The model that waits for room blocks every load behind it. Requests to what is loaded pass it by, also to the one
      that is to leave, and a `keep_alive` that they name holds: it then leaves that long after the last of them.
      So it is in Ollama v0.34.1 (server/sched.go).
    * An error that speaks of memory closes every runner.
    """

    def __init__(
        self,
        executable: Sequence[str],
        *,
        generation: Generation = F,
        models_dir: Path | str | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        copy_to: Copy | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
        max_loaded: int = MAX_LOADED,
        report: Callable[[str], object] | None = None,
    ) -> None:
        """`keep_alive_s` is what a request gets that names none: 0 closes after the request, infinite never.

        `report` gets a line, such as `runner of demo:latest: signal: killed`, when a loaded runner ends by itself.
        """
        self.generation = generation
        self.keep_alive_s = keep_alive_s
        self.max_loaded = max_loaded
        self.report = report
        self._executable = executable
        self._spawn = partial(
            spawn,
            executable,
            models_dir=models_dir,
            generation=generation,
            arguments=arguments,
            environment=environment,
            copy_to=copy_to,
        )
        self._loaded: dict[str, Loaded] = {}
        self._pending = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    @property
    def loaded(self) -> list[Loaded]:
        """Every runner that has not been closed yet, the one loaded first in front."""
        return list(self._loaded.values())

    @asynccontextmanager
    async def runner(self, model: str, *, keep_alive_s: float | None = None, num_ctx: int = 0) -> AsyncIterator[Loaded]:
        """One request's use of a model. Raises `LoadError`."""
        loaded = await self._acquire(model, keep_alive_s, num_ctx)
        try:
            yield loaded
        except (StatusError, StreamError) as error:
            if self.generation.expires_on_oom and is_out_of_memory(str(error)):
                for each in self.loaded:
                    self.expire(each)
            raise
        finally:
            self._release(loaded)

    async def complete(
        self, model: str, request: Request, *, keep_alive_s: float | None = None, context: bool = False
    ) -> Completion:
        """A whole request; with `context` the ids of prompt and answer are asked for while its final line is handled.

        Cancelling it closes the connection to the runner.
        """
        async with self.runner(model, keep_alive_s=keep_alive_s) as loaded:
            return await loaded.client.complete(request, tokenize=context)

    def expire(self, loaded: Loaded) -> None:
        """Closes it, or has it closed when its last request ends."""
        loaded.keep_alive_s = 0
        self._stop_timer(loaded)
        if loaded.users == 0:
            self._unload(loaded)

    async def unload(self, model: str) -> None:
        """Expires the model, if it is loaded, and waits for its end."""
        if loaded := self._loaded.get(model):
            self.expire(loaded)
            await loaded.unloaded.wait()

    async def close(self) -> None:
        """Ends every runner, one after the other, whatever it does."""
        for loaded in self.loaded:
            self._unload(loaded)
            await loaded.unloaded.wait()

    async def _acquire(self, model: str, keep_alive_s: float | None, num_ctx: int) -> Loaded:
        loaded = self._loaded.get(model)
        if loaded is not None and await self._use(loaded, keep_alive_s):
            return loaded
        async with self._pending:
            while True:
                loaded = self._loaded.get(model)
                if loaded is None and len(self._loaded) < self.max_loaded:
                    break
                if loaded is not None and await self._use(loaded, keep_alive_s):
                    return loaded
                leaving = loaded or self._victim()
                self.expire(leaving)
                await leaving.unloaded.wait()
            loaded = self._start(model, keep_alive_s, num_ctx)
            if not self.generation.waits_with_request:
                await self._load_to_the_end(loaded)
                return loaded
        await self._load(loaded)
        return loaded

    async def _load_to_the_end(self, loaded: Loaded) -> None:
        """A load that goes on, and is kept, when its request has gone away."""

        def keep(loading: asyncio.Task[None]) -> None:
            if not loading.cancelled() and loading.exception() is None:
                self._release(loaded)

        loading = asyncio.create_task(self._load(loaded))
        try:
            await asyncio.shield(loading)
        except asyncio.CancelledError:
            loading.add_done_callback(keep)
            raise

    def _start(self, model: str, keep_alive_s: float | None, num_ctx: int) -> Loaded:
        try:
            process = self._spawn(model)
        except OSError as error:
            reason = f"fork/exec {self._executable[0]}: {(error.strerror or str(error)).lower()}"
            raise LoadError(f"failed to start mlx runner: {reason}") from error
        loaded = Loaded(model, process, self.keep_alive_s if keep_alive_s is None else keep_alive_s, num_ctx)
        self._loaded[model] = loaded
        return loaded

    async def _load(self, loaded: Loaded) -> None:
        process = loaded.process
        try:
            await asyncio.sleep(POLL_S)
            while not await asyncio.to_thread(process.try_ready):
                await asyncio.sleep(POLL_S)
            loaded.status = process.status or _UNKNOWN
            self._watch(loaded)
        except BaseException:
            loaded.users -= 1
            self._unload(loaded)
            raise
        finally:
            loaded.settled.set()

    def _watch(self, loaded: Loaded) -> None:
        if self.report is None:
            return
        report, loop = self.report, asyncio.get_running_loop()

        def tell(how: str) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(report, f"runner of {loaded.model}: {how}")

        loaded.process.tell_end(tell)

    async def _use(self, loaded: Loaded, keep_alive_s: float | None) -> bool:
        """Counts a request in, if the runner is well."""
        await loaded.settled.wait()
        if loaded.closing or not await loaded.ping() or loaded.closing:
            return False
        loaded.users += 1
        loaded.expires_at = math.inf
        self._stop_timer(loaded)
        if keep_alive_s is not None:
            loaded.keep_alive_s = keep_alive_s
        return True

    def _release(self, loaded: Loaded) -> None:
        loaded.users -= 1
        if loaded.users or loaded.closing:
            return
        loaded.expires_at = time.time() + loaded.keep_alive_s
        if loaded.keep_alive_s <= 0:
            self._unload(loaded)
        elif loaded.keep_alive_s < math.inf:
            loaded.timer = asyncio.get_running_loop().call_later(loaded.keep_alive_s, self.expire, loaded)

    def _victim(self) -> Loaded:
        candidates = sorted(self.loaded, key=lambda loaded: (loaded.keep_alive_s, loaded.model))
        return next((loaded for loaded in candidates if loaded.users == 0), candidates[0])

    def _stop_timer(self, loaded: Loaded) -> None:
        if loaded.timer is not None:
            loaded.timer.cancel()
            loaded.timer = None

    def _unload(self, loaded: Loaded) -> None:
        if loaded.closing:
            return
        loaded.closing = True
        self._stop_timer(loaded)
        task = asyncio.ensure_future(self._end(loaded))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self, loaded: Loaded) -> None:
        await asyncio.to_thread(loaded.process.close)
        await loaded.client.close()
        self._loaded.pop(loaded.model, None)
        loaded.unloaded.set()
