"""Reads the arrays of an opened model from its files.

Owner: the engine thread. Every array is made, read and evaluated on the thread that calls these functions.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, cast

import mlx.core as mx

from runner.errors import ModelError
from runner.model.opened import OpenedModel
from runner.model.progress import Progress
from runner.model.sources.header import HeaderEntry, read_header
from runner.model.weights.assemble import arrays_of
from runner.model.weights.dtype import DtypePlan
from runner.model.weights.packed import Arrays

_READ_FILES = 60
"""A lazy array keeps its file open, MLX's four readers do so a little longer, and macOS allows 256 open files."""
_READ_BYTES = 512 << 20
"""Readers wait for each other at the end of a group, so there should be few; but the log shows progress by groups."""


def read_arrays(opened: OpenedModel, types: DtypePlan, progress: Progress) -> dict[str, Arrays]:
    """Reads the arrays of every needed tensor, in bounded groups."""
    early_types = {
        part.weight: early for name, part in opened.tensors.items() if (early := types.early_dtype(name, part))
    }
    loaded: dict[HeaderEntry, mx.array] = {}
    for group in _groups(part for tensor in opened.tensors.values() for part in tensor.parts):
        loaded |= _read_group(group, early_types)
        progress.add(sum(entry.nbytes for entry in group))
    return arrays_of(opened, loaded.__getitem__)


def _groups(entries: Iterable[HeaderEntry]) -> Iterator[list[HeaderEntry]]:
    """Groups the arrays to read so that no group spans too many files or, except for one large array, bytes."""
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
    """Reads a group of arrays, converted to their `types` if given; leaves none of their files open."""
    try:
        files = {path: mx.load(_source(path), format="safetensors") for path in {entry.file for entry in group}}
        arrays = {entry: cast("dict[str, mx.array]", files[entry.file]).pop(entry.key) for entry in group}
        arrays |= {entry: arrays[entry].astype(types[entry]) for entry in group if entry in types}
        mx.eval(list(arrays.values()))
    except (RuntimeError, KeyError, OSError) as error:
        if len(group) > 1:  # again one by one, to find the faulty one
            return {entry: array for single in group for entry, array in _read_group([single], types).items()}
        path = group[0].file
        read_header(path)  # raises the proper error if the file was truncated or removed since it was opened
        raise ModelError(f"read {path}: {error}") from error
    return arrays


def _source(path: Path) -> str | BinaryIO:
    """Returns the file for MLX: its name or, if that is not UTF-8, the open file, which is slower."""
    name = str(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        return path.open("rb")
    return name
