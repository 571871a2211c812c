"""The disk cache as the engine sees it, and how it is made. Owner: the engine thread."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from protocol.stats import DiskCounts
from runner.cache.trie_cache import TrieCache
from runner.disk.files import Files
from runner.disk.namespace import disk_facts, namespace_of
from runner.disk.reader import Reader
from runner.disk.restores import Restores
from runner.disk.serialize import forms_of, moves_what_the_host_reads
from runner.disk.store import SegmentStore
from runner.disk.sweep import Sweep
from runner.disk.thread import DiskThread
from runner.disk.writer import UnsavedSegments, Writer
from runner.engine.parts import Examined, Facts, Parts, Wing
from runner.engine.request import Request
from runner.engine.scheduler import Scheduler
from runner.logs import Log
from runner.settings import CheckSettings
from runner.sizes import sized

log = Log(__name__)
_MOST_AGE_S = 30 * 86_400.0
_MOST_WRITTEN = 100 << 30
"""Bytes a day: a disk that lasts for 600 TB lasts 15 years."""
_KNOWN_TOKENS = 64  # computed, until their speed says something


class DiskTier:
    """Restores before a request begins, and writes between slices. Whatever goes wrong here switches it off: answers go
    on without it."""

    name = "disk"

    def __init__(self, disk: DiskThread, restores: Restores, writer: Writer, scheduler: Scheduler) -> None:
        self._disk = disk
        self._restores = restores
        self._writer = writer
        self._scheduler = scheduler
        self._off = False

    @property
    def patience_s(self) -> float | None:
        """The longest that the engine may wait for a message, in seconds; None: for good."""
        return self._restores.patience_s

    def add(self, request: Request) -> None:
        """Queues a request, which waits there while the disk is asked."""
        if not self._off:
            with self._guarded():
                self._writer.resume()
                self._restores.add(request)
        self._scheduler.add(request)

    def pending(self, *, idle: bool) -> bool:
        """Returns True if `advance` has something to do. `idle`: the engine has nothing else to compute."""
        return not self._off and (self._restores.pending or self._writer.pending(idle=idle))

    def advance(self, *, idle: bool, interrupted: Callable[[], bool]) -> None:
        """Takes one segment, or copies for a moment."""
        with self._guarded():
            if self._restores.advance():
                return
            if self._writer.pending(idle=idle):
                answering = any(batch.steps for batch in self._scheduler.batches.all)
                self._writer.advance(idle=idle, interrupted=interrupted, answering=answering)

    def keep(self, receive: Callable[[], None]) -> None:
        """Ends all requests, and writes what is not on disk. `receive` waits for a message, and handles it."""
        with self._guarded():
            for generation in (*self._scheduler.prefilling, *self._scheduler.batches.generations):
                generation.request.cancel()
            self._scheduler.compute_slice()  # closes them
            while (pending := self._writer.pending(idle=True)) or self._writer.writing:
                if pending:
                    self._writer.advance(idle=True, interrupted=lambda: False)
                else:
                    receive()

    def counts(self) -> DiskCounts:
        """Returns the numbers of the tier."""
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


class DiskWing(Wing):
    """The disk tier that `--disk-cache` asks for."""

    name = "disk"

    def facts(self, settings: CheckSettings, found: Examined | None) -> Mapping[str, Facts | None]:
        del found
        return {} if settings.disk_cache is None else {"disk": disk_facts(settings.disk_cache)}

    def join(self, parts: Parts) -> None:
        """Starts its thread, unless there can be none, which the log explains."""
        parts.disk = tier = _open_tier(parts)
        if tier is not None:
            parts.beside.append(tier)
            parts.counts.disk = tier.counts


def _open_tier(parts: Parts) -> DiskTier | None:
    settings, scheduler, names = parts.settings, parts.scheduler, parts.names
    directory = settings.disk_cache
    if directory is None:
        return None
    cache = scheduler.cache
    if not isinstance(cache, TrieCache):
        log.warning("no disk cache", why=f"it needs --cache trie, not --cache {settings.cache}")
        return None
    files = Files()
    try:
        files.make_directory(directory)
        if not files.is_private(directory):
            log.warning("no disk cache", why="others may write to the directory", directory=str(directory))
            return None
        budget_bytes = settings.disk_memory.bytes_of(files.space(directory)[0])
        namespace = namespace_of(settings, parts.model, parts.make_layers, parts.loaded.dtypes, parts.salt)
    except OSError as error:
        log.warning("no disk cache", why=f"{error.filename}: {error.strerror}")
        return None
    store = SegmentStore(files, directory, namespace.name, namespace.about, _MOST_WRITTEN)
    digest_of = names.digest_of if names is not None else lambda _: None
    name_of = names.name_of if names is not None else lambda _: 0
    reader = Reader(store, namespace.root, digest_of, name_of)
    disk = DiskThread(files, store, Sweep(files, directory, budget_bytes, _MOST_AGE_S), reader, parts.post)

    def prefill_token_s() -> float | None:
        tokens = scheduler.prefilled_tokens
        return scheduler.prefill_s / tokens if tokens >= _KNOWN_TOKENS else None

    def ready() -> None:
        scheduler.queue.changed = True

    on_device = moves_what_the_host_reads()
    unsaved = UnsavedSegments(
        cache,
        store.index,
        namespace.name,
        namespace.root,
        digest_of=digest_of,
        touch=disk.touch,
        on_device=on_device,
        most_bytes=budget_bytes,
    )
    restores = Restores(
        cache,
        disk,
        parts.salt,
        {} if parts.sketch is None else forms_of(parts.sketch),
        parts.loaded.logits,
        prefill_token_s=prefill_token_s,
        ready=ready,
        shares=not on_device,
    )
    tier = DiskTier(disk, restores, Writer(cache, disk, unsaved), scheduler)
    days = round(_MOST_AGE_S / 86_400)
    log.info("disk cache", directory=str(directory), namespace=namespace.name, budget=sized(budget_bytes), days=days)
    disk.start()
    return tier
