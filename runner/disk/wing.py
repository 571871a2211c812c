"""Makes the disk tier of an engine, and lists the contents of the directory for `mlx-runner check`."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from runner import json_files
from runner.cache.trie_cache import TrieCache
from runner.device import on_cuda
from runner.disk.files import Files
from runner.disk.namespace import namespace_of
from runner.disk.restores import Restores
from runner.disk.segment import format_of
from runner.disk.segment_reader import Reader
from runner.disk.serialize import forms_of
from runner.disk.store import SegmentStore
from runner.disk.sweep import Sweep
from runner.disk.thread import DiskThread
from runner.disk.tier import DiskTier
from runner.disk.unsaved import UnsavedSegments
from runner.disk.writer import Writer
from runner.engine.parts import Examined, Facts, Parts, Wing
from runner.logs import Log
from runner.settings import CheckSettings
from runner.sizes import counted, sized

log = Log(__name__)
_MOST_ABOUT_BYTES = 1 << 20
_MOST_AGE_S = 30 * 86_400.0
_MOST_WRITTEN = 100 << 30
"""The most bytes that are written in a day. A disk that endures 600 TB of writes then lasts 15 years."""
_KNOWN_TOKENS = 64  # the prompt tokens that must be computed before the measured speed is used


class DiskWing(Wing):
    """Adds a disk tier to an engine with `--disk-cache`."""

    name = "disk"

    def facts(self, settings: CheckSettings, found: Examined | None) -> Mapping[str, Facts | None]:
        del found
        return {} if settings.disk_cache is None else {"disk": disk_facts(settings.disk_cache)}

    def join(self, parts: Parts) -> None:
        """Makes the tier and starts the disk thread, or logs the reason why there is no tier."""
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

    on_device = on_cuda()
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


class KeptModel(msgspec.Struct, frozen=True):
    """A model's folder in the directory. A model has several folders if its weights, types or versions differ."""

    name: str
    folder: str
    files: int
    bytes: int


class DiskFacts(Facts, frozen=True, kw_only=True):
    """The models in the directory of the disk cache, the largest folder first."""

    directory: str
    models: list[KeptModel]

    @property
    def text(self) -> str:
        models = (
            f"{model.name}, {sized(model.bytes)} in {counted(model.files, 'file')} ({model.folder})"
            for model in self.models
        )
        return f"{self.directory}: {'; '.join(models) or 'empty'}"


def disk_facts(directory: Path) -> DiskFacts:
    """Returns the models in a directory. Leaves out folders that cannot be read."""
    models = []
    try:
        folders = [name for name in Files().names(directory) if format_of(name) is not None]
    except OSError:
        folders = []
    for folder in folders:
        try:
            sizes = {entry.name: entry.nbytes for entry in Files().entries(directory / folder)}
            if sizes.get("about.json", _MOST_ABOUT_BYTES) >= _MOST_ABOUT_BYTES:
                continue  # too large, or no plain file: reading a pipe would never end
            about = json_files.parse((directory / folder / "about.json").read_bytes())
        except (OSError, ValueError):
            continue
        name = about.get("model") if isinstance(about, dict) else None
        models.append(KeptModel(str(name), folder, len(sizes), sum(sizes.values())))
    models.sort(key=lambda model: (-model.bytes, model.folder))
    return DiskFacts(directory=str(directory), models=models)
