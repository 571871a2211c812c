"""Reads the arrays of an opened model from files, in groups, on the calling thread."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, cast

import mlx.core as mx

from runner.errors import ModelError
from runner.model.opened import OpenedModel
from runner.model.progress import Progress
from runner.model.sources.safetensors import HeaderEntry, os_reason, read_tensor_header
from runner.model.weights.assembly import map_arrays
from runner.model.weights.dtype import DtypePlan
from runner.model.weights.packed import Arrays

_READ_FILES = 60
"""The most files in a group: a lazy array keeps its file open, MLX's four reading threads keep it open a little longer,
and macOS allows 256 open files."""
_READ_BYTES = 512 << 20
"""The most bytes in a group. Fewer groups are faster, because reading threads wait for each other at the end of a
group. But the log shows progress only after a group."""
_CHECKED_BYTES = 8 << 20
Headers = dict[Path, frozenset[HeaderEntry]]
FAULTS = (RuntimeError, KeyError, OSError)
"""The exceptions that MLX raises for a file that it cannot read."""


def read_arrays(opened: OpenedModel, types: DtypePlan, progress: Progress) -> dict[str, Arrays]:
    """Returns the arrays of every tensor of `opened`, read in bounded groups."""
    early_types = {
        part.weight: early for name, part in opened.tensors.items() if (early := types.early_dtype(name, part))
    }
    return map_arrays(opened, read_entries(parts_of(opened), early_types, progress.add).__getitem__)


def read_entries(
    entries: Iterable[HeaderEntry], types: Mapping[HeaderEntry, mx.Dtype], done: Callable[[int], None]
) -> dict[HeaderEntry, mx.array]:
    """Returns the arrays of `entries`, converted to their `types` if given. Calls `done` with each group's bytes."""
    loaded: dict[HeaderEntry, mx.array] = {}
    for group in _groups(entries):
        loaded |= _read_group(group, types)
        done(sum(entry.nbytes for entry in group))
    return loaded


def check_readable(entries: Iterable[HeaderEntry]) -> None:
    """Reads the data of `entries` once, and drops it. Raises a ModelError that names the first faulty file.

    After a failed lazy read, MLX (0.32) may miscount the work of its threads, and a later evaluation never ends. So the
    files of an optional part are read here first; MLX then reads them from the system's memory.
    """
    seen: Headers = {}
    buffer = memoryview(bytearray(_CHECKED_BYTES))
    for entry in entries:
        check_unchanged(entry, seen)
        for at in range(0, entry.nbytes, _CHECKED_BYTES):
            read_data(entry, at, buffer[: entry.nbytes - at])


def check_unchanged(entry: HeaderEntry, seen: Headers) -> None:
    """Raises ModelError if the array's file no longer has this entry. `seen` keeps the headers read so far."""
    if entry.file not in seen:
        seen[entry.file] = frozenset(read_tensor_header(entry.file).values())
    if entry not in seen[entry.file]:
        raise ModelError(f"{entry.file}: tensor {entry.key} has changed since the model was opened")


def parts_of(opened: OpenedModel) -> list[HeaderEntry]:
    """Returns the entry of every array that the model needs."""
    return [part for tensor in opened.tensors.values() for part in tensor.parts]


def _groups(entries: Iterable[HeaderEntry]) -> Iterator[list[HeaderEntry]]:
    """Yields groups of `entries`. A group has at most _READ_FILES files and _READ_BYTES bytes, or one larger array."""
    group: list[HeaderEntry] = []
    files: set[Path] = set()
    group_bytes = 0
    for entry in entries:
        if group and (len(files | {entry.file}) > _READ_FILES or group_bytes + entry.nbytes > _READ_BYTES):
            yield group
            group, files, group_bytes = [], set(), 0
        group.append(entry)
        files.add(entry.file)
        group_bytes += entry.nbytes
    if group:
        yield group


def _read_group(group: list[HeaderEntry], types: Mapping[HeaderEntry, mx.Dtype]) -> dict[HeaderEntry, mx.array]:
    """Returns the arrays of a group, converted to their `types` if given. Leaves no file open."""
    try:
        arrays = open_entries(group)
    except FAULTS as error:
        if len(group) > 1:  # one by one: too many files may be open, or one is faulty
            return {entry: array for single in group for entry, array in _read_group([single], types).items()}
        raise file_fault(group[0].file, error) from error
    try:
        arrays |= {entry: arrays[entry].astype(types[entry]) for entry in group if entry in types}
        mx.eval(list(arrays.values()))
    except FAULTS as error:
        check_readable(group)  # raises the proper error
        raise file_fault(group[0].file, error) from error
    return arrays


def open_entries(group: list[HeaderEntry]) -> dict[HeaderEntry, mx.array]:
    """Returns lazy arrays. MLX reads each array when it is evaluated, and keeps the array's file open until then."""
    files = {path: mx.load(_source(path), format="safetensors") for path in {entry.file for entry in group}}
    return {entry: cast("dict[str, mx.array]", files[entry.file]).pop(entry.key) for entry in group}


def file_fault(path: Path, error: Exception) -> ModelError:
    """Returns the error for a file that MLX could not read."""
    read_tensor_header(path)  # raises the proper error if the file was truncated or removed since it was opened
    return ModelError(f"read {path}: {error}")


def _source(path: Path) -> str | BinaryIO:
    """Returns a file for `mx.load`: its path or, if that is not UTF-8, the open file, which is slower."""
    name = str(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        return path.open("rb")
    return name


def read_data(part: HeaderEntry, at: int, memory: memoryview) -> None:
    """Fills `memory` with the data of the array `part`, from byte `at` of that data on. Raises ModelError."""
    try:
        with part.file.open("rb", buffering=0) as file:
            file.seek(part.start + at)
            while memory:
                count = file.readinto(memory)
                if not count:
                    raise ModelError(f"{part.file}: tensor {part.key}: the file ends within its data")
                memory = memory[count:]
    except OSError as error:
        raise ModelError(f"read {part.file}: {os_reason(error)}") from error
