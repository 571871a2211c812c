"""Opens a directory in the style of Hugging Face: `config.json`, `model*.safetensors`, tokenizer files."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from runner import json_files
from runner.errors import ModelError
from runner.model.sources.checkpoint import (
    Checkpoint,
    File,
    ReportFault,
    Tensor,
    merge_tensors,
    placeholder_tensor,
    raise_fault,
)
from runner.model.sources.foreign import refuse_file, refuse_without_weights
from runner.model.sources.header import HeaderEntry, os_reason, read_header

_WEIGHTS = "model*.safetensors"
_INDEX = "model.safetensors.index.json"


def open_directory(directory: Path, name: str, report: ReportFault = raise_fault) -> Checkpoint:
    """Reads the header of every weight file.

    Raises a ModelError that names what is missing or broken. Faults of single files go to `report`, and the tensors
    that the index lists for them become `unreadable`.
    """
    try:
        found = sorted(directory.iterdir())
    except NotADirectoryError:
        refuse_file(directory)
    except OSError as error:
        raise ModelError(f"open {directory}: {os_reason(error)}") from error
    folders = [path.name for path in found if os.path.isdir(path)]  # noqa: PTH112 - Path.is_dir raises for links to closed places
    # A dangling link is no folder, and stays to be reported: interrupted downloads leave such links.
    paths = [path for path in found if path.name not in folders]
    files = {path.name: File(path) for path in paths if path.suffix != ".safetensors"}
    weights = [path for path in paths if path.match(_WEIGHTS)]
    if not weights:
        refuse_without_weights(directory, _WEIGHTS, [path.name for path in paths], folders)
    places = _places(files.get(_INDEX), report)
    entries: dict[str, HeaderEntry] = {}
    unreadable: dict[str, Tensor] = {}

    def mark_unreadable(path: Path, fault: ModelError) -> None:
        report(fault)
        names = [key for key, shard in places.items() if shard == path.name]
        unreadable.update((key, placeholder_tensor(key, path)) for key in names or [path.name])

    for path in weights:
        try:
            header = read_header(path)
        except ModelError as error:
            mark_unreadable(path, error)
            continue
        for key, entry in header.items():
            other = entries.setdefault(key, entry)
            if other is not entry:
                report(ModelError(f"tensor {key} is in two files: {other.file} and {path}"))
    # A stale index, which names none of the files, is ignored, as mlx-lm ignores all; else a download is incomplete.
    known = {path.name for path in weights}
    stale = known.isdisjoint(places.values())
    shards = {shard for key, shard in places.items() if key not in entries and "/" not in shard and not stale}
    for path in sorted(directory / shard for shard in shards):
        if path not in weights and not os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises for long names
            mark_unreadable(path, ModelError(f"open {path}: no such file or directory (named by {_INDEX})"))
    return Checkpoint(
        name=name,
        path=directory,
        files=files,
        tensors=merge_tensors([_tensors(entries)]),
        from_store=False,
        missing_file=f"open {directory}/{{}}: no such file or directory",
        unreadable={key: tensor for key, tensor in unreadable.items() if key not in entries},
    )


def _places(index: File | None, report: ReportFault) -> dict[str, str]:
    """Returns the file of each tensor according to the index; empty without one."""
    if index is None:
        return {}
    try:
        found = json_files.parse(index.read())
    except ModelError as error:
        report(error)
    except ValueError as error:
        report(ModelError(f"{index.path}: want a weight_map of tensor to file: {error}"))
    else:
        places = found.get("weight_map") if isinstance(found, dict) else found
        if isinstance(places, dict):
            return {str(key): str(shard) for key, shard in places.items()}
        report(ModelError(f"{index.path}: want a weight_map of tensor to file: found {type(places).__name__}"))
    return {}


def _tensors(entries: Mapping[str, HeaderEntry]) -> Iterator[Tensor]:
    """Yields logical tensors by MLX's naming: `x.weight` with `x.scales` is packed."""
    for key, entry in entries.items():
        stem, _, last = key.rpartition(".")
        scale = entries.get(f"{stem}.scales") if f"{stem}.weight" in entries else None
        if scale is None or last not in ("weight", "scales", "biases"):
            yield Tensor(key, entry)
        elif last == "weight":
            yield Tensor(key, entry, scale, entries.get(f"{stem}.biases"))
