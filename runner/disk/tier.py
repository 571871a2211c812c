"""The disk cache, as the engine calls it. Owner: the engine thread."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from protocol.stats import DiskCounts
from runner.disk.restores import Restores
from runner.disk.thread import DiskThread
from runner.disk.writer import Writer
from runner.engine.request import Request
from runner.engine.scheduler import Scheduler
from runner.logs import Log

log = Log(__name__)


class DiskTier:
    """Restores segments before a request begins, and writes segments between slices. An error in the disk cache's code
    switches the tier off, and requests continue without the disk."""

    name = "disk"

    def __init__(self, disk: DiskThread, restores: Restores, writer: Writer, scheduler: Scheduler) -> None:
        self._disk = disk
        self._restores = restores
        self._writer = writer
        self._scheduler = scheduler
        self._off = False

    @property
    def patience_s(self) -> float | None:
        """The most seconds that the engine may wait for a message. None means no limit."""
        return self._restores.patience_s

    def add(self, request: Request) -> None:
        """Queues a request. The request stays in the queue while the disk thread reads for it."""
        if not self._off:
            with self._guarded():
                self._writer.resume()
                self._restores.add_request(request)
        self._scheduler.add(request)

    def pending(self, *, idle: bool) -> bool:
        """Returns True if `advance` has something to do. Set `idle` if the engine has nothing else to compute."""
        return not self._off and (self._restores.pending or self._writer.pending(idle=idle))

    def advance(self, *, idle: bool, interrupted: Callable[[], bool]) -> None:
        """Handles one waiting request (`Restores.take_next`), or copies from the trie for a moment."""
        with self._guarded():
            if self._restores.take_next():
                return
            if self._writer.pending(idle=idle):
                answering = any(batch.steps for batch in self._scheduler.batches.all)
                self._writer.write_some(idle=idle, interrupted=interrupted, answering=answering)

    def keep(self, receive: Callable[[], None]) -> None:
        """Ends all requests, and writes all tokens of the trie that are not on disk yet. `receive` waits for a message
        to the engine thread and handles it."""
        with self._guarded():
            for generation in (*self._scheduler.prefilling, *self._scheduler.batches.generations):
                generation.request.cancel()
            self._scheduler.compute_slice()  # closes the sessions
            while (pending := self._writer.pending(idle=True)) or self._writer.writing:
                if pending:
                    self._writer.write_some(idle=True, interrupted=lambda: False)
                else:
                    receive()

    def counts(self) -> DiskCounts:
        store, sweep, unsaved = self._disk.store, self._disk.sweep, self._writer.unsaved
        state = "reading" if store.why_not_writing or unsaved.refused else "on"
        return DiskCounts(
            state="off" if self._off or self._disk.fault else state,
            segments=len(store.index.names),
            held_bytes=sweep.held_bytes,
            budget_bytes=sweep.most_bytes,
            written_bytes=store.written_bytes,
            read_bytes=store.read_bytes,
            evicted_bytes=sweep.evicted_bytes,
            restores=self._restores.count,
            restored_tokens=self._restores.tokens,
            restore_s=self._restores.seconds,
            copy_s=self._writer.seconds,
            pending_tokens=unsaved.pending_tokens(),
            write_errors=store.write_errors,
            rejected=dict(store.rejected),
        )

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            log.exception("the disk cache is off")
            self._off = True
            self._restores.release()
