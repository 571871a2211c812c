"""The disk cache as the engine sees it. Owner: the engine thread."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from protocol.stats import DiskCounts
from runner.cache.trie_cache import TrieCache
from runner.engine.request import Request
from runner.logs import Log

if TYPE_CHECKING:
    from runner.disk.check import SelfCheck
    from runner.disk.restores import Restores
    from runner.disk.thread import DiskThread
    from runner.disk.writes import Writes
    from runner.engine.scheduler import Scheduler

log = Log(__name__)


class DiskTier:
    """Restores before a request begins, writes between slices, and checks when idle. Whatever goes wrong here switches
    it off: answers go on without it."""

    def __init__(
        self, disk: "DiskThread", restores: "Restores", writes: "Writes", check: "SelfCheck", scheduler: "Scheduler"
    ) -> None:
        self._disk, self._restores, self._writes, self._scheduler = disk, restores, writes, scheduler
        self._check = check
        self._off = False

    @property
    def _cache(self) -> TrieCache:
        cache = self._scheduler.cache
        assert isinstance(cache, TrieCache)
        return cache

    @property
    def _state(self) -> str:
        if self._off or self._disk.fault:
            return "off"
        refused = self._writes.freight.refused if self._writes.freight is not None else ""
        return "reading" if self._disk.shelf.why_not_writing or refused else "on"

    @property
    def patience_s(self) -> float | None:
        """The longest that the engine may wait for a message, in seconds; None: for good."""
        return self._restores.patience_s

    def add(self, request: Request) -> None:
        """Queues a request, which waits there while the disk is asked."""
        if not self._off:
            with self._guarded():
                self._check.give_way()
                self._writes.resume()
                self._restores.add(self._cache, request)
        self._scheduler.add(request)

    def pending(self, *, idle: bool) -> bool:
        """Returns True if `advance` has something to do. `idle`: the engine has nothing else to compute."""
        if self._off:
            return False
        checking = idle and self._check.pending and self._restores.patience_s is None
        return self._restores.pending or self._writes.pending(self._cache, idle=idle) or checking

    def advance(self, *, idle: bool, interrupted: Callable[[], bool]) -> None:
        """Adopts one segment, copies for a moment, or checks a slice of what was restored."""
        with self._guarded():
            if self._restores.advance(self._cache):
                return
            if self._writes.pending(self._cache, idle=idle):
                answering = any(batch.steps for batch in self._scheduler.batches.all)
                self._writes.advance(self._cache, idle=idle, interrupted=interrupted, answering=answering)
            elif idle and self._restores.patience_s is None:
                self._check.advance(self._cache)

    def keep(self, receive: Callable[[], None]) -> None:
        """Ends all requests, and writes what is not on disk. `receive` waits for a message, and handles it."""
        with self._guarded():
            for generation in (*self._scheduler.prefilling, *self._scheduler.batches.generations):
                generation.request.cancel()
            self._scheduler.advance()  # closes them
            while (pending := self._writes.pending(self._cache, idle=True)) or self._writes.writing:
                if pending:
                    self._writes.advance(self._cache, idle=True, interrupted=lambda: False)
                else:
                    receive()

    def counts(self) -> DiskCounts:
        """Returns the numbers of the tier."""
        shelf, sweep, freight = self._disk.shelf, self._disk.sweep, self._writes.freight
        return DiskCounts(
            state=self._state,
            segments=len(shelf.index.names),
            held_bytes=sweep.held_bytes,
            budget_bytes=sweep.most_bytes,
            written_bytes=shelf.written_bytes,
            read_bytes=shelf.read_bytes,
            evicted_bytes=sweep.evicted_bytes,
            restores=self._restores.count,
            restored_tokens=self._restores.tokens,
            restore_s=self._restores.seconds,
            copy_s=self._writes.seconds,
            pending_tokens=freight.pending_tokens(self._cache) if freight is not None else 0,
            write_errors=shelf.write_errors,
            rejected=dict(shelf.rejected),
            checks=self._check.count,
            failed_checks=self._check.failures,
        )

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            log.exception("the disk cache is off")
            self._off = True
            self._restores.release()
