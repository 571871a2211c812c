"""The identity of a model's weights, by which what was computed with them is kept on disk.

Never a name or a path: a blob has its digest in its name, and of other files everything counts that changes when one is
written. No weight is read.
"""

import os
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from runner.model.sources.checkpoint import Checkpoint

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
