"""A Hugging Face style directory: `config.json`, `model*.safetensors`, tokenizer files."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from runner.errors import ModelError
from runner.model.checkpoint import Checkpoint, File, Tensor, merge
from runner.model.header import Entry, read_header, reason

_WEIGHTS = "model*.safetensors"
_INDEX = "model.safetensors.index.json"


def open_directory(directory: Path, name: str) -> Checkpoint:
    """Reads the header of every weight file. Raises ModelError that names what is missing or broken."""
    try:
        paths = [path for path in sorted(directory.iterdir()) if path.is_file()]
    except OSError as error:
        raise ModelError(f"open {directory}: {reason(error)}") from error
    files = {path.name: File(path) for path in paths if path.suffix != ".safetensors"}
    weights = [path for path in paths if path.match(_WEIGHTS)]
    if "config.json" in files and not weights:
        raise ModelError(f"no {_WEIGHTS} in {directory}")
    entries: dict[str, Entry] = {}
    for path in weights:
        for key, entry in read_header(path).items():
            other = entries.setdefault(key, entry)
            if other is not entry:
                raise ModelError(f"tensor {key} is in two files: {other.file} and {path}")
    _check_shards(directory, files.get(_INDEX), entries)
    return Checkpoint(
        name=name,
        files=files,
        tensors=merge([_tensors(entries)]),
        from_store=False,
        missing_file=f"open {directory}/{{}}: no such file or directory",
    )


def _check_shards(directory: Path, index: File | None, entries: Mapping[str, Entry]) -> None:
    """Names the shard that an interrupted download left out; a merely stale index is ignored, as mlx-lm does."""
    if index is None:
        return
    try:
        places = json.loads(index.read())["weight_map"]
        shards = {str(shard) for key, shard in places.items() if key not in entries}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index.path}: want a weight_map of tensor to file: {error}") from error
    missing = sorted(shard for shard in shards if "/" not in shard and not (directory / shard).exists())
    if missing:
        raise ModelError(f"open {directory / missing[0]}: no such file or directory (named by {_INDEX})")


def _tensors(entries: Mapping[str, Entry]) -> Iterator[Tensor]:
    """Logical tensors by MLX's names: `x.weight` with `x.scales` is packed."""
    for key, entry in entries.items():
        stem, _, last = key.rpartition(".")
        scale = entries.get(f"{stem}.scales") if f"{stem}.weight" in entries else None
        if scale is None or last not in ("weight", "scales", "biases"):
            yield Tensor(key, entry)
        elif last == "weight":
            yield Tensor(key, entry, scale, entries.get(f"{stem}.biases"))
