"""Schedules the worker processes: how many run at once, and which are kept for the next request."""

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from time import monotonic

import msgspec

from protocol.format import Format
from runner.errors import RequestError
from runner.grammar.fork_server import ForkServer, start_fork_server
from runner.grammar.guide import Grammar
from runner.grammar.messages import COMPILE_S, Compile, CompilerSetup, Follow, State, encode_message
from runner.grammar.worker import Worker, WorkerGrammar
from runner.logs import Log

log = Log(__name__)
_UNDISTURBED_S = 0.25
_MORE_THAN_RUN = 4  # formats may wait undisturbed
_MOST_KEPT = 8
_MOST_KEPT_BYTES = 64 << 20
_WORKER_BYTES = 128 << 20
_RECEIVE_BYTES = 1 << 20


class WorkerPool:
    """Compiles formats in processes that can be killed.

    Every answer that follows a grammar, and every format being compiled, has a worker of its own. Compiling may take
    5 s, but only a quarter of a second while many more requests with formats are there than can run. After its answer,
    a worker is kept for the same format while there is room.

    Owner: the event loop, except for `nbytes`, `end_kept` and the grammars that it hands out.
    """

    def __init__(self, setup: CompilerSetup, size: int, running: int) -> None:
        """`size` is the number of tokens in the vocabulary; at most `running` answers are computed at once."""
        self.worker_bytes = _WORKER_BYTES
        """The limit on the memory of each worker."""
        self.most_kept_bytes = _MOST_KEPT_BYTES
        """The limit on the memory of all workers that are kept."""
        self._setup = setup
        self._size = size
        self._most = running + _MORE_THAN_RUN
        self._waiting: set[Future[Grammar]] = set()
        self._numbers = count(1)
        self._compiling: dict[Worker, float] = {}  # start times, oldest first
        self._busy: set[Worker] = set()
        self._kept: list[Worker] = []  # most recently used last
        self._fork_server: asyncio.Task[ForkServer] | None = None

    @property
    def nbytes(self) -> int:
        """Memory of all workers, as last reported by them. Any thread may read it."""
        return sum(worker.nbytes for worker in [*self._busy, *self._kept])

    def end_kept(self) -> None:
        """Ends the workers that no answer uses, which no longer count in `nbytes`. Any thread may call it."""
        while self._kept:
            with suppress(IndexError):  # the event loop has taken the last one
                self._loop.call_soon_threadsafe(self._end, self._kept.pop())

    def expect(self) -> Future[Grammar]:
        """Returns the grammar of a request that waits, for `compile`. Cancel it if the request ends before."""
        grammar: Future[Grammar] = Future()
        self._waiting.add(grammar)
        grammar.add_done_callback(self._waiting.discard)
        return grammar

    def compile(self, wanted: Format, grammar: Future[Grammar]) -> None:
        """Starts to compile. Cancelling the future stops it; the future raises RequestError for an invalid format."""
        self._waiting.discard(grammar)
        self._loop = loop = asyncio.get_running_loop()
        task = loop.create_task(self._compile(msgspec.json.encode(wanted), grammar))

        def end(done: Future[Grammar]) -> None:
            if done.cancelled():
                loop.call_soon_threadsafe(task.cancel)

        grammar.add_done_callback(end)

    async def _compile(self, key: bytes, grammar: Future[Grammar]) -> None:
        try:
            worker, beginning = await self._worker(key)
        except RequestError as error:
            if grammar.set_running_or_notify_cancel():
                grammar.set_exception(error)
        except Exception as error:
            if grammar.set_running_or_notify_cancel():
                grammar.set_exception(error)
            raise
        else:
            ready = WorkerGrammar(worker, beginning, self._size)
            if grammar.set_running_or_notify_cancel():
                grammar.set_result(ready)
            else:
                ready.release()

    async def _worker(self, key: bytes) -> tuple[Worker, State]:
        """Returns a worker that has compiled the format, with the state at the beginning of an answer."""
        if (worker := self._take_kept(key)) is not None:
            with suppress(RequestError):  # the process may have ended
                return worker, await self._beginning(worker)
        worker = await self._fork(key)
        return worker, await self._beginning(worker)

    def _take_kept(self, key: bytes) -> Worker | None:
        for worker in [worker for worker in self._kept if worker.key == key]:
            with suppress(ValueError):  # `end_kept` has just taken it
                self._kept.remove(worker)
                return worker
        return None

    async def _beginning(self, worker: Worker) -> State:
        """Returns the next state of `worker`, the beginning of an answer. Ends the worker if it raises."""
        self._busy.add(worker)
        self._compiling[worker] = monotonic()
        receiving = asyncio.ensure_future(self._receive(worker))
        try:
            while not (await asyncio.wait([receiving], timeout=_UNDISTURBED_S))[0]:
                self._make_way(worker)
            return receiving.result()
        except BaseException:
            receiving.cancel()
            self._end(worker)
            raise
        finally:
            del self._compiling[worker]

    async def _receive(self, worker: Worker) -> State:
        loop = asyncio.get_running_loop()
        try:
            while (state := worker.take()) is None:
                worker.feed(await loop.sock_recv(worker.channel, _RECEIVE_BYTES))
        except (OSError, RequestError) as error:
            too_long = monotonic() - self._compiling[worker] >= COMPILE_S
            why = f"compiling it takes longer than {COMPILE_S:.0f} s; make it simpler" if too_long else error
            raise RequestError(f"Format: {why}") from None
        if state.error:
            raise RequestError(state.error)
        if state.left_out:
            log.warning("a schema is not enforced in all parts", left_out=state.left_out)
        return state

    def _make_way(self, worker: Worker) -> None:
        """Lowers the priority of a worker that compiles for long.

        Raises RequestError if too many requests wait and this one has been compiling the longest.
        """
        if self._fork_server is not None:
            self._fork_server.result().slow(worker.number)
        crowded = len(self._waiting) + len(self._busy) > self._most
        if crowded and worker is next(iter(self._compiling)):
            raise RequestError(f"Format: compiling it takes longer than {_UNDISTURBED_S} s while others wait")

    async def _fork(self, key: bytes) -> Worker:
        """Returns a new worker, which starts to compile."""
        loop = asyncio.get_running_loop()
        if self._fork_server is None or (self._fork_server.done() and not self._fork_server.result().alive):
            if self._fork_server is not None:
                self._fork_server.result().close()
            self._fork_server = asyncio.create_task(start_fork_server(self._setup))
        fork_server = await asyncio.shield(self._fork_server)
        if fork_server.fault:
            raise RequestError(fork_server.fault)

        def give_back(worker: Worker) -> None:
            self._busy.discard(worker)  # at once: the next answer may need the memory
            loop.call_soon_threadsafe(self._take_back, worker)

        try:
            worker = Worker(key, next(self._numbers), self.worker_bytes, give_back)
        except OSError as error:
            raise RequestError(f"Format: cannot start a worker to compile it: {error.strerror}", 503) from None
        fork_server.fork(worker.number, worker.other_end)
        worker.other_end.close()
        try:
            await loop.sock_sendall(worker.channel, encode_message(Compile(key, worker.memory_bytes)))
        except OSError:
            self._end(worker)
            raise RequestError("Format: the worker process has ended; send the request again", 503) from None
        except BaseException:
            self._end(worker)
            raise
        worker.awaited += 1
        return worker

    def _take_back(self, worker: Worker) -> None:
        """Keeps a worker whose answer has ended, at the beginning of the next one, if it can be used again."""
        if worker.awaited or worker.broken or worker.nbytes > self.most_kept_bytes:
            self._end(worker)
            return
        try:
            worker.send(Follow([], restart=True))
        except RequestError:
            self._end(worker)
            return
        self._kept.append(worker)
        while len(kept := [*self._kept]) > _MOST_KEPT or sum(each.nbytes for each in kept) > self.most_kept_bytes:
            with suppress(IndexError):  # `end_kept` has taken them
                self._end(self._kept.pop(0))

    def _end(self, worker: Worker) -> None:
        """Ends a worker, whatever it is doing."""
        self._busy.discard(worker)
        worker.channel.close()
        if self._fork_server is not None and self._fork_server.done():
            self._fork_server.result().kill(worker.number)
