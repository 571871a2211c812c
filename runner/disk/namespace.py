"""The name of a model's folder: whatever shapes its keys and values is in it, so nobody goes on with other numbers.
And what is in such folders, for `mlx-runner check`."""

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
import msgspec

from runner import __version__, cpu, json_files
from runner.cache.layers import adapt, flatten
from runner.cache.layers.snapshot import Ledger
from runner.device import device
from runner.disk.files import Files
from runner.disk.segment import VERSION, format_of
from runner.disk.serialize import describe
from runner.engine.parts import Facts
from runner.model import OpenedModel
from runner.model.sources.checkpoint import ModelCheckpoint
from runner.settings import Settings
from runner.sizes import counted, sized

_DIGEST = re.compile(r"(?:sha256[-:])?([0-9a-f]{64})")
_MOST_HEADER_BYTES = 100_000_000
_MOST_ABOUT_BYTES = 1 << 20


class Namespace(NamedTuple):
    """Everything that shapes the bytes of a model's keys and values, and its digests."""

    name: str
    """The name of the folder."""
    root: bytes
    """The key of all points."""
    about: bytes
    """The same in words."""


def namespace_of(
    settings: Settings, model: OpenedModel, make_layers: Callable[[], list[object]], dtypes: list[str], salt: str
) -> Namespace:
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
        "blas": cpu.detect(settings.blas, settings.blas_threads).name,
        "kernels": cpu.find_kernels(settings.kernels).name,
        "byte order": sys.byteorder,
    }
    text = json.dumps(identity, sort_keys=True).encode()
    root = blake2b(text, digest_size=32).digest()
    name = f"v{VERSION}-{blake2b(text, digest_size=16).hexdigest()}"
    return Namespace(name, root, json.dumps({"model": model.name, **identity}, indent=1).encode())


def weights_identity(checkpoint: ModelCheckpoint) -> list[str]:
    """Returns a line for each file of weights and for each text file that the model computes by: never a name or a path
    alone. A blob has its digest in its name; of other files everything counts that changes when one is written. No
    weight is read. Raises OSError."""
    return [*sorted(_weights(checkpoint)), *sorted(_texts(checkpoint))]


def _weights(checkpoint: ModelCheckpoint) -> Iterator[str]:
    for path in {part.file for tensor in checkpoint.tensors.values() for part in tensor.parts}:
        # In Ollama's store and in a cache of Hugging Face, whose snapshots are links to blobs.
        found = _DIGEST.fullmatch(Path(os.path.realpath(path)).name)
        yield f"sha256 {found[1]}" if found else f"{path.name} {_written(path)}"


def _texts(checkpoint: ModelCheckpoint) -> Iterator[str]:
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


def _machine() -> str:
    """Returns the kind of processor: other instructions round otherwise."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


# --- The line of `mlx-runner check`.


class KeptModel(msgspec.Struct, frozen=True):
    """A model whose conversations are kept; one of other weights, versions or types counts as another."""

    name: str
    folder: str
    files: int
    bytes: int


class DiskFacts(Facts, frozen=True, kw_only=True):
    """The directory of the disk cache, the largest model first."""

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
    """Returns what is in a directory. What cannot be read is left out."""
    models = []
    try:
        folders = [name for name in Files().names(directory) if format_of(name) is not None]
    except OSError:
        folders = []
    for folder in folders:
        try:
            sizes = {entry.name: entry.nbytes for entry in Files().entries(directory / folder)}
            if sizes.get("about.json", _MOST_ABOUT_BYTES) >= _MOST_ABOUT_BYTES:
                continue  # perhaps of another kind: a pipe would never end
            about = json_files.parse((directory / folder / "about.json").read_bytes())
        except (OSError, ValueError):
            continue
        name = about.get("model") if isinstance(about, dict) else None
        models.append(KeptModel(str(name), folder, len(sizes), sum(sizes.values())))
    models.sort(key=lambda model: (-model.bytes, model.folder))
    return DiskFacts(directory=str(directory), models=models)
