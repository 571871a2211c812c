"""Starts and ends worker processes, and keeps some of them for later requests."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from time import monotonic

import msgspec

from protocol.format import Format
from runner.engine.answer_grammar import Grammar
from runner.errors import RequestError
from runner.grammar.messages import COMPILE_S, FORK, KILL, SLOW, Compile, CompilerSetup, Follow, State, encode_message
from runner.grammar.worker import ForkServer, Worker, WorkerGrammar, start_fork_server
from runner.logs import Log
from runner.model import OpenedModel
from runner.tokenizer import Tokenizer

log = Log(__name__)

_UNDISTURBED_S = 0.25
_SILENT_S = 3 * COMPILE_S
"""The longest wait for a worker. Even on a busy machine, the kernel's timer should have ended it long before."""
_KILL_S = 1.0
"""The time limit for the fork server to kill a worker. After it, the fork server itself is ended."""
_MORE_THAN_RUN = 4  # formats that may wait, beyond the answers that run, before compiling is cut short
_MOST_KEPT = 8
_MOST_KEPT_BYTES = 64 << 20
_KEPT_SHARE = 32  # together, the workers that no answer uses get 1/32 of the memory that the model leaves
_LEAST_WORKER_BYTES, _WORKER_BYTES = 32 << 20, 128 << 20
_WORKER_SHARE = 8  # one worker gets 1/8 of the memory that the model leaves
_RECEIVE_BYTES = 1 << 20
_SILENT = "Format: the process that compiles it has ended, or does not answer; send the request again"


class WorkerPool:
    """Compiles formats in processes that can be killed.

    Each answer that follows a grammar, and each format that is being compiled, has its own worker. Compiling may take 5
    s, or a quarter of a second while too many requests with formats wait. After its answer, a worker is kept for
    further requests with the same format while there is room. Owner: the event loop, except for `nbytes`, `end_kept`
    and the grammars that the pool returns.
    """

    def __init__(self, setup: CompilerSetup, size: int, running: int, clock: Callable[[], float] = monotonic) -> None:
        """`size` is the number of tokens in the vocabulary. At most `running` answers are computed at the same time.
        `clock` returns seconds."""
        self.worker_bytes = _WORKER_BYTES
        """The limit on the memory of each worker."""
        self.most_kept_bytes = _MOST_KEPT_BYTES
        """The limit on the memory of all kept workers together."""
        self._setup = setup
        self._size = size
        self._clock = clock
        self._most = running + _MORE_THAN_RUN
        self._waiting: set[Future[Grammar]] = set()
        self._numbers = count(1)
        self._compiling: dict[Worker, float] = {}  # worker -> the time at which it began to compile, oldest first
        self._busy: set[Worker] = set()
        self._kept: list[Worker] = []  # workers for later requests, the most recently used last
        self._fork_server: asyncio.Task[ForkServer] | None = None

    @property
    def nbytes(self) -> int:
        """The memory of all workers, by their last reports. Any thread may read this property."""
        return sum(worker.nbytes for worker in [*self._busy, *self._kept])

    def end_kept(self) -> None:
        """Ends the workers that no answer uses, and leaves them out of `nbytes` immediately. Any thread may call it."""
        while self._kept:
            with suppress(IndexError):  # the event loop has just taken the last kept worker
                self._loop.call_soon_threadsafe(self._end, self._kept.pop())

    def expect(self) -> Future[Grammar]:
        """Returns a future for a waiting request, to pass to `compile`. Cancel it if the request ends before that."""
        grammar: Future[Grammar] = Future()
        self._waiting.add(grammar)
        grammar.add_done_callback(self._waiting.discard)
        return grammar

    def compile(self, wanted: Format, grammar: Future[Grammar]) -> None:
        """Starts to compile. Cancelling the future stops that. The future raises RequestError for an invalid format."""
        self._waiting.discard(grammar)
        self._loop = loop = asyncio.get_running_loop()
        task = loop.create_task(self._compile(msgspec.json.encode(wanted), grammar))

        def end(done: Future[Grammar]) -> None:
            if done.cancelled():
                loop.call_soon_threadsafe(task.cancel)

        grammar.add_done_callback(end)

    def replayed(self, vocab_size: int) -> Grammar:
        """Returns a grammar without a worker, for a tape that plays back."""
        return WorkerGrammar(None, State(), vocab_size)

    async def _compile(self, key: bytes, grammar: Future[Grammar]) -> None:
        try:
            worker, beginning = await self.compiled(key)
        except Exception as error:
            if grammar.set_running_or_notify_cancel():
                grammar.set_exception(error)
            if not isinstance(error, RequestError):
                raise
            return
        if beginning.left_out:
            log.warning("a schema is not enforced in all parts", left_out=beginning.left_out)
        ready = WorkerGrammar(worker, beginning, self._size)
        if grammar.set_running_or_notify_cancel():
            grammar.set_result(ready)
        else:
            ready.release()

    async def compiled(self, key: bytes) -> tuple[Worker, State]:
        """Returns a worker that has compiled the format `key` (as JSON), and the state at the beginning of an answer.
        Raises RequestError for an invalid format."""
        if (worker := self._take_kept(key)) is not None:
            with suppress(RequestError):  # the process may have ended
                return worker, await self._beginning(worker)
        worker = await self._fork(key)
        return worker, await self._beginning(worker, encode_message(Compile(key, self.worker_bytes)))

    def _take_kept(self, key: bytes) -> Worker | None:
        for worker in [worker for worker in self._kept if worker.key == key]:
            with suppress(ValueError):  # `end_kept` has just taken this worker
                self._kept.remove(worker)
                return worker
        return None

    async def _beginning(self, worker: Worker, order: bytes = b"") -> State:
        """Sends `order` and returns the next state, the beginning of an answer. Ends the worker if this fails."""
        self._busy.add(worker)
        self._compiling[worker] = self._clock()
        receiving = asyncio.ensure_future(self._receive(worker, order))
        try:
            while not (await asyncio.wait([receiving], timeout=_UNDISTURBED_S))[0]:
                self._make_way(worker)
                self._end_silent(worker)
            return receiving.result()
        except BaseException:
            receiving.cancel()
            self._end(worker)
            raise
        finally:
            del self._compiling[worker]

    async def _receive(self, worker: Worker, order: bytes) -> State:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(worker.channel, order)
            while (state := worker.next_state()) is None:
                worker.feed(await loop.sock_recv(worker.channel, _RECEIVE_BYTES))
        except (OSError, RequestError) as error:
            if isinstance(error, OSError) or worker.killed_s is not None or not worker.fork_server.alive:
                raise RequestError(_SILENT, 503) from None
            too_long = self._clock() - self._compiling[worker] >= COMPILE_S
            why = f"compiling it takes longer than {COMPILE_S:.0f} s; make it simpler" if too_long else error
            raise RequestError(f"Format: {why}") from None
        if state.error:
            raise RequestError(state.error)
        return state

    def _make_way(self, worker: Worker) -> None:
        """Lowers the priority of a worker that compiles slowly. Raises RequestError if too many requests wait and this
        worker has been compiling for the longest time."""
        worker.fork_server.order(SLOW, worker.number)
        crowded = len(self._waiting) + len(self._busy) > self._most
        if crowded and worker is next(iter(self._compiling)):
            raise RequestError(f"Format: compiling it took {_UNDISTURBED_S} s while others wait: make it simpler")

    def _end_silent(self, worker: Worker) -> None:
        """Kills a worker far beyond its time limit. If that fails, ends the fork server and raises RequestError."""
        now_s = self._clock()
        if worker.killed_s is None:
            if now_s - self._compiling[worker] >= _SILENT_S:
                log.warning("a worker that compiles a format does not answer", worker=worker.number)
                worker.killed_s = now_s
                worker.fork_server.order(KILL, worker.number)
        elif now_s - worker.killed_s >= _KILL_S:
            log.warning("the process that forks workers does not answer")
            worker.fork_server.close()
            raise RequestError(_SILENT, 503)

    async def _fork(self, key: bytes) -> Worker:
        """Returns a new worker that waits for a `Compile`. Raises RequestError if no worker can start."""
        loop = asyncio.get_running_loop()
        if self._fork_server is None or (self._fork_server.done() and not self._fork_server.result().alive):
            if self._fork_server is not None:
                self._fork_server.result().close()
            self._fork_server = asyncio.create_task(start_fork_server(self._setup))
        fork_server = await asyncio.shield(self._fork_server)
        if fork_server.fault:
            raise RequestError(fork_server.fault)

        def give_back(worker: Worker) -> None:
            self._busy.discard(worker)  # in this thread, not later: the next answer may need the memory
            loop.call_soon_threadsafe(self._take_back, worker)

        try:
            worker = Worker(key, next(self._numbers), fork_server, self.worker_bytes, give_back)
        except OSError as error:
            raise RequestError(f"Format: cannot start a worker to compile it: {error.strerror}", 503) from None
        fork_server.order(FORK, worker.number, worker.other_end.fileno())
        worker.other_end.close()
        worker.awaited += 1
        return worker

    def _take_back(self, worker: Worker) -> None:
        """Moves a worker whose answer has ended back to the beginning and keeps it; ends it if that is impossible."""
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
            with suppress(IndexError):  # `end_kept` has just taken all kept workers
                self._end(self._kept.pop(0))

    def _end(self, worker: Worker) -> None:
        self._busy.discard(worker)
        worker.channel.close()
        worker.fork_server.order(KILL, worker.number)

    async def close(self) -> None:
        """Ends all processes. None must be compiling. A runner need not call it: its own end ends them too."""
        for worker in [*self._busy, *self._kept]:
            self._end(worker)
        if self._fork_server is not None:
            (await self._fork_server).close()


def pool_for(model: OpenedModel, tokenizer: Tokenizer, running: int, free_bytes: int) -> WorkerPool:
    """Returns the pool for a model that leaves `free_bytes` of memory, and for at most `running` answers together."""
    files = {name: os.fsencode(file.path) for name, file in model.checkpoint.files.items()}
    setup = CompilerSetup(files, merge_eos=not model.checkpoint.from_store, vocab_size=model.vocab_size)
    size = tokenizer.vocab_size
    workers = WorkerPool(setup, min(model.vocab_size or size, size), running)
    workers.worker_bytes = max(_LEAST_WORKER_BYTES, min(workers.worker_bytes, free_bytes // _WORKER_SHARE))
    workers.most_kept_bytes = min(workers.most_kept_bytes, free_bytes // _KEPT_SHARE)
    return workers
