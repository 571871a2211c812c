"""Builds the disk cache of an engine."""

import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from runner import __version__, blas
from runner.cache.layers import adapt, flatten
from runner.cache.layers.snapshot import Ledger
from runner.cache.trie_cache import TrieCache
from runner.disk.check import Sample, SelfCheck
from runner.disk.files import Files
from runner.disk.reader import Reader
from runner.disk.restores import Restores
from runner.disk.segment import VERSION
from runner.disk.serialize import describe
from runner.disk.shelf import Shelf
from runner.disk.sweep import Sweep
from runner.disk.thread import DiskThread
from runner.disk.tier import DiskTier
from runner.disk.writes import Freight, Writes
from runner.engine.parts import Parts, Wing
from runner.logs import Log
from runner.model import OpenedModel
from runner.model.sources.checkpoint import Checkpoint
from runner.model.weights.dtype import device
from runner.settings import Settings
from runner.sizes import shown

log = Log(__name__)

# --- The identity of a model's weights, by which what was computed with them is kept on disk. Never a name or a
# path: a blob has its digest in its name, and of other files everything counts that changes when one is written. No
# weight is read.

_DIGEST = re.compile(r"(?:sha256[-:])?([0-9a-f]{64})")
_MOST_HEADER_BYTES = 100_000_000


def weights_identity(checkpoint: Checkpoint) -> list[str]:
    """Returns a line for each file of weights and for each text file that the model computes by. Raises OSError."""
    return [*sorted(_weights(checkpoint)), *sorted(_texts(checkpoint))]


def _weights(checkpoint: Checkpoint) -> Iterator[str]:
    for path in {part.file for tensor in checkpoint.tensors.values() for part in tensor.parts}:
        # In Ollama's store and in a cache of Hugging Face, whose snapshots are links to blobs.
        found = _DIGEST.fullmatch(Path(os.path.realpath(path)).name)
        yield f"sha256 {found[1]}" if found else f"{path.name} {_written(path)}"


def _texts(checkpoint: Checkpoint) -> Iterator[str]:
    """Yields the digests of what shapes the computation: sizes, scaling and processing, not the tokenizer."""
    for name in ("config.json", "preprocessor_config.json", "processor_config.json"):
        data = checkpoint.file(name)
        if data is not None:
            yield f"{name} {blake2b(data, digest_size=16).hexdigest()}"


def _written(path: Path) -> str:
    """Returns what changes when a file is written, moved or replaced: its header, size, times and inode."""
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        count = int.from_bytes(file.read(8), "little")
        header = blake2b(file.read(min(count, _MOST_HEADER_BYTES)), digest_size=16).hexdigest()
    return f"{header} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"


_MOST_AGE_S = 30 * 86_400.0
_MOST_WRITTEN = 100 << 30
"""Bytes a day: a disk that lasts for 600 TB lasts 15 years."""
_KNOWN_TOKENS = 64  # computed, until their speed says something


class _Namespace(NamedTuple):
    """Everything that shapes the bytes of a model's keys and values, and its digests."""

    name: str
    """The name of the folder."""
    root: bytes
    """The key of all points."""
    about: bytes
    """The same in words."""


class DiskWing(Wing):
    """The disk tier that `--disk-cache` asks for."""

    def join(self, parts: Parts) -> None:
        """Starts its thread."""
        parts.disk = open_tier(parts)
        if parts.disk is not None:
            parts.counts.disk = parts.disk.counts


def open_tier(parts: Parts) -> DiskTier | None:
    """Returns the disk tier, and starts its thread; None if there can be none, which the log explains."""
    settings, model, scheduler = parts.settings, parts.model, parts.scheduler
    make_layers, forward = parts.make_layers, parts.loaded.logits
    directory = settings.disk_cache
    if directory is None:
        return None
    if not isinstance(scheduler.cache, TrieCache):
        log.warning("no disk cache", why=f"it needs --cache trie, not --cache {settings.cache}")
        return None
    files = Files()
    try:
        files.make_directory(directory)
        if not files.is_private(directory):
            log.warning("no disk cache", why="others may write to the directory", directory=str(directory))
            return None
        budget_bytes = settings.disk_memory.bytes_of(files.space(directory)[0])
        namespace = _namespace(settings, model, make_layers, parts.loaded.dtypes, parts.salt)
    except OSError as error:
        log.warning("no disk cache", why=f"{error.filename}: {error.strerror}")
        return None
    shelf = Shelf(files, directory, namespace.name, namespace.about, _MOST_WRITTEN)
    names = parts.names
    digest_of = names.digest_of if names is not None else lambda _: None
    name_of = names.name_of if names is not None else lambda _: 0
    reader = Reader(shelf, namespace.root, digest_of, name_of)
    disk = DiskThread(files, shelf, Sweep(files, directory, budget_bytes, _MOST_AGE_S), reader, parts.post)
    counters = scheduler.journal.counters

    def prefill_token_s() -> float | None:
        slices = counters.slices()
        return slices.prefill_s / slices.prefill_tokens if slices.prefill_tokens >= _KNOWN_TOKENS else None

    def ready() -> None:
        scheduler.journal.queue.changed = True

    on_device = device() != "cpu" and not mx.metal.is_available()  # CUDA moves what the host looks at

    def make_freight() -> Freight:
        index = shelf.index
        return Freight(
            index,
            namespace.name,
            namespace.root,
            digest_of=digest_of,
            touch=disk.touch,
            on_device=on_device,
            most_bytes=budget_bytes,
        )

    check = SelfCheck(disk, make_layers, forward)
    restores = Restores(
        disk,
        parts.salt,
        check,
        lambda: Sample(make_layers, forward),
        prefill_token_s=prefill_token_s,
        ready=ready,
        shares=not on_device,
    )
    tier = DiskTier(disk, restores, Writes(disk, make_freight), check, scheduler)
    log.info(
        "disk cache",
        directory=str(directory),
        namespace=namespace.name,
        budget=shown(budget_bytes),
        days=round(_MOST_AGE_S / 86_400),
    )
    disk.start()
    return tier


def _namespace(
    settings: Settings, model: OpenedModel, make_layers: Callable[[], list[object]], dtypes: list[str], salt: str
) -> _Namespace:
    """Returns the namespace of a model as it computes here. Raises OSError."""
    identity = {
        "format": VERSION,
        "weights": weights_identity(model.checkpoint),
        "architecture": model.architecture,
        "dtypes": dtypes,
        "keys and values": salt,
        "layers": [describe(adapt(layer, Ledger())) for layer in flatten(make_layers())],
        "versions": {
            "runner": __version__,
            **{name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm")},
        },
        "device": [device(), str(mx.device_info().get("device_name", "")), _machine()],
        "blas": blas.detect(settings.blas, settings.blas_threads).name,
        "byte order": sys.byteorder,
    }
    text = json.dumps(identity, sort_keys=True).encode()
    root = blake2b(text, digest_size=32).digest()
    name = f"v{VERSION}-{blake2b(text, digest_size=16).hexdigest()}"
    return _Namespace(name, root, json.dumps({"model": model.name, **identity}, indent=1).encode())


def _machine() -> str:
    """Returns the kind of processor: other instructions round otherwise."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
