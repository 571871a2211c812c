"""Opens a directory in the style of Hugging Face: `config.json`, `model*.safetensors`, tokenizer files."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from runner import json_files
from runner.errors import ModelError
from runner.model.sources.checkpoint import (
    File,
    LogicalTensor,
    ModelCheckpoint,
    ReportFault,
    merge_tensors,
    placeholder_tensor,
    raise_fault,
)
from runner.model.sources.foreign import refuse_file, refuse_without_weights
from runner.model.sources.safetensors import HeaderEntry, os_reason, read_tensor_header

_WEIGHTS = "model*.safetensors"
_INDEX = "model.safetensors.index.json"


def open_directory(directory: Path, name: str, report: ReportFault = raise_fault) -> ModelCheckpoint:
    """Opens a model: reads the headers of the weight files that the index names, or of all weight files.

    Raises a ModelError that names the missing or broken file. Passes the fault of a single weight file to `report`; the
    tensors that the index lists for that file become `unreadable`.
    """
    try:
        found = sorted(directory.iterdir())
    except NotADirectoryError:
        refuse_file(directory)
    except OSError as error:
        raise ModelError(f"open {directory.absolute()}: {os_reason(error)}", advice="") from error
    folders = [path.name for path in found if os.path.isdir(path)]  # noqa: PTH112 - Path.is_dir raises for links to closed places
    # A dangling link counts as a file, so that it is reported: interrupted downloads leave such links.
    paths = [path for path in found if path.name not in folders]
    files = {path.name: File(path) for path in paths if path.suffix != ".safetensors"}
    warnings: list[str] = []
    places = _places(files.get(_INDEX), warnings.append)
    held: dict[str, list[str]] = {}
    for key, shard in places.items():
        held.setdefault(shard, []).append(key)
    named = [path for path in paths if path.suffix == ".safetensors" and path.name in held]
    others = [path for path in paths if path.match(_WEIGHTS) and path not in named]
    if not named and not others:
        refuse_without_weights(directory, _WEIGHTS, [path.name for path in paths], folders)
    # An index that names none of the files is stale and is ignored; mlx-lm ignores every index. An index that names
    # only some of the files means an incomplete download, unless the other files hold the missing tensors.
    unknown = sorted(directory / shard for shard in held if "/" not in shard) if named else []
    missing = [path for path in unknown if path not in named and not os.path.isfile(path)]  # noqa: PTH113 - Path.is_file raises for long names
    weights = named if named and not missing else [*named, *others]
    if unread := [path.name for path in others if path not in weights]:
        warnings.append(f"not read, as {_INDEX} does not name them: {', '.join(unread)}")
    entries: dict[str, HeaderEntry] = {}
    unreadable: dict[str, LogicalTensor] = {}

    def mark_unreadable(path: Path, fault: ModelError) -> None:
        report(fault)
        unreadable.update((key, placeholder_tensor(key, path)) for key in held.get(path.name, [path.name]))

    for path in weights:
        try:
            header = read_tensor_header(path)
        except ModelError as error:
            mark_unreadable(path, error)
            continue
        for key, entry in header.items():
            other = entries.get(key)
            if other is None or places.get(key) == path.name:
                entries[key] = entry
            elif places.get(key) != other.file.name:
                report(ModelError(f"tensor {key} is in two files: {other.file} and {path}"))
    lost = {shard for key, shard in places.items() if key not in entries}
    for path in missing:
        if path.name in lost:
            mark_unreadable(path, ModelError(f"open {path}: no such file or directory (named by {_INDEX})"))
    return ModelCheckpoint(
        name=name,
        path=directory,
        files=files,
        tensors=merge_tensors([_tensors(entries)]),
        from_store=False,
        missing_file=f"open {directory}/{{}}: no such file or directory",
        unreadable={key: tensor for key, tensor in unreadable.items() if key not in entries},
        warnings=warnings,
    )


def _places(index: File | None, warn: Callable[[str], None]) -> dict[str, str]:
    """Returns tensor name -> file name, from the index; {} without a readable index. `warn` gets the index's fault."""
    if index is None:
        return {}
    try:
        found = json_files.parse(index.read())
        places = found.get("weight_map") if isinstance(found, dict) else found
        if isinstance(places, dict):
            return {str(key): str(shard) for key, shard in places.items()}
        why = f"{index.path}: want a weight_map of tensor to file: found {type(places).__name__}"
    except ModelError as error:
        why = str(error)  # the error names the file
    except ValueError as error:
        why = f"{index.path}: want a weight_map of tensor to file: {error}"
    warn(f"{why}; all {_WEIGHTS} are read instead")
    return {}


def _tensors(entries: Mapping[str, HeaderEntry]) -> Iterator[LogicalTensor]:
    """Yields the logical tensors of `entries`, which have MLX's names: `x.weight` is packed if there is `x.scales`."""
    for key, entry in entries.items():
        stem, _, last = key.rpartition(".")
        scale = entries.get(f"{stem}.scales") if f"{stem}.weight" in entries else None
        if scale is None or last not in ("weight", "scales", "biases"):
            yield LogicalTensor(key, entry)
        elif last == "weight":
            yield LogicalTensor(key, entry, scale, entries.get(f"{stem}.biases"))
