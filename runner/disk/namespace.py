"""The name of a model's folder: a digest of everything that shapes the model's keys and values. So a process never
continues with keys and values that it would not have computed itself."""

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

from runner import __version__, cpu
from runner.cache.layers import adapt, flatten
from runner.cache.layers.snapshot import Ledger
from runner.device import device
from runner.disk.segment import VERSION
from runner.disk.serialize import describe
from runner.model import OpenedModel
from runner.model.sources.checkpoint import ModelCheckpoint
from runner.settings import Settings

_DIGEST = re.compile(r"(?:sha256[-:])?([0-9a-f]{64})")
_MOST_HEADER_BYTES = 100_000_000


class Namespace(NamedTuple):
    """The identity of a model's keys and values, and two digests of the identity."""

    name: str
    """The name of the folder."""
    root: bytes
    """The digest that is the key in the hash of every point."""
    about: bytes
    """The identity and the model's name as JSON, for people."""


def namespace_of(
    settings: Settings, model: OpenedModel, make_layers: Callable[[], list[object]], dtypes: list[str], salt: str
) -> Namespace:
    """Returns the namespace of a model as this process computes it on this machine. Raises OSError."""
    identity = {
        "format": VERSION,
        "weights": weights_identity(model.checkpoint),
        "architecture": model.architecture,
        "dtypes": dtypes,
        "keys and values": salt,
        "layers": [describe(adapt(layer, Ledger())) for layer in flatten(make_layers())],
        "versions": {"runner": __version__, **{name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm")}},
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
    """Returns a line for each file of weights, and for each text file that shapes the computation.

    The line of a blob is the digest in the blob's name. The line of any other file changes whenever that file is
    written, moved or replaced. Reads headers, but no weights. Raises OSError."""
    return [*sorted(_weights(checkpoint)), *sorted(_texts(checkpoint))]


def _weights(checkpoint: ModelCheckpoint) -> Iterator[str]:
    for path in {part.file for tensor in checkpoint.tensors.values() for part in tensor.parts}:
        # Files of Ollama's store, and of a Hugging Face cache (through links), are blobs named by their digest.
        found = _DIGEST.fullmatch(Path(os.path.realpath(path)).name)
        yield f"sha256 {found[1]}" if found else f"{path.name} {_written(path)}"


def _texts(checkpoint: ModelCheckpoint) -> Iterator[str]:
    """Yields a line for each text file that changes keys and values. The tokenizer's files change neither."""
    for name in ("config.json", "preprocessor_config.json", "processor_config.json"):
        data = checkpoint.file(name)
        if data is not None:
            yield f"{name} {blake2b(data, digest_size=16).hexdigest()}"


def _written(path: Path) -> str:
    """Returns a digest of a file's header, the file's size, times and inode. A new file differs in one of them."""
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        count = int.from_bytes(file.read(8), "little")
        header = blake2b(file.read(min(count, _MOST_HEADER_BYTES)), digest_size=16).hexdigest()
    return f"{header} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"


def _machine() -> str:
    """Returns the model name of the processor, empty if unknown: other processors may round differently."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
