"""Reads the arrays of an opened model from its files.

Owner: the engine thread. Every array is made, read and evaluated on the thread that calls these functions.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, cast

import mlx.core as mx

from runner.errors import ModelError
from runner.model.opened import OpenedModel
from runner.model.progress import Progress
from runner.model.sources.header import HeaderEntry, data_starts, open_file, os_reason, read_header
from runner.model.weights.assemble import arrays_of
from runner.model.weights.dtype import DtypePlan
from runner.model.weights.packed import Arrays
from runner.process.limits import free_descriptors, raise_limit

_READ_FILES = 60
"""A lazy array keeps its file open, MLX's four readers do so a little longer, and macOS allows 256 open files."""
_READ_BYTES = 512 << 20
"""Readers wait for each other at the end of a group, so there should be few; but the log shows progress by groups."""

_CHECKED_BYTES = 8 << 20

_SPARE_FILES = 64
"""Descriptors for all else while lazy arrays keep their files open: sockets, logs, modules."""
_FAULTS = (RuntimeError, KeyError, OSError)


def read_arrays(opened: OpenedModel, types: DtypePlan, progress: Progress) -> dict[str, Arrays]:
    """Reads the arrays of every needed tensor, in bounded groups."""
    early_types = {
        part.weight: early for name, part in opened.tensors.items() if (early := types.early_dtype(name, part))
    }
    loaded: dict[HeaderEntry, mx.array] = {}
    for group in _groups(parts_of(opened)):
        loaded |= _read_group(group, early_types)
        progress.add(sum(entry.nbytes for entry in group))
    return arrays_of(opened, loaded.__getitem__)


def check_readable(entries: Iterable[HeaderEntry]) -> None:
    """Reads the data of these arrays once, and drops it. Raises a ModelError that names the first faulty file.

    After a lazy read that failed, MLX (0.32) may miscount what its threads have to do, and a later evaluation waits for
    ever. So whatever the runner can do without is read like this before MLX reads it, from the system's memory then.
    """
    files: dict[Path, list[HeaderEntry]] = {}
    for entry in entries:
        files.setdefault(entry.file, []).append(entry)
    buffer = memoryview(bytearray(_CHECKED_BYTES))
    for path, group in files.items():
        starts = data_starts(path)
        with open_file(path) as (file, _):
            try:
                for entry in group:
                    if entry not in starts:
                        raise ModelError(f"{path}: tensor {entry.key} has changed since the model was opened")
                    file.seek(starts[entry])
                    left = entry.nbytes
                    while left:
                        count = file.readinto(buffer[:left])
                        if not count:
                            raise ModelError(f"{path}: tensor {entry.key} is truncated")
                        left -= count
            except OSError as error:
                raise ModelError(f"read {path}: {os_reason(error)}") from error


def lazy_arrays(opened: OpenedModel) -> dict[str, Arrays]:
    """Returns the arrays of every needed tensor, which are read when they are first evaluated.

    Until then their files stay open. If those are more than this process may open, the smallest are read at once.
    Raises ModelError for a file that has changed since the model was opened.
    """
    raise_limit()
    entries = parts_of(opened)
    sizes = Counter[Path]()
    for entry in entries:
        sizes[entry.file] += entry.nbytes
    most = max(0, free_descriptors() - _SPARE_FILES)
    late: dict[Path, list[HeaderEntry]] = {file: [] for file, _ in sizes.most_common(most)}
    early: list[HeaderEntry] = []
    for entry in entries:
        late.get(entry.file, early).append(entry)
    loaded: dict[HeaderEntry, mx.array] = {}
    for group in _groups(early):
        loaded |= _read_group(group, {})
    for path, group in late.items():
        try:
            loaded |= _opened(group)
        except _FAULTS as error:
            raise _fault(path, error) from error
    return arrays_of(opened, loaded.__getitem__)


def parts_of(opened: OpenedModel) -> list[HeaderEntry]:
    """Returns every array that the model needs."""
    return [part for tensor in opened.tensors.values() for part in tensor.parts]


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
        arrays = _opened(group)
    except _FAULTS as error:
        if len(group) > 1:  # again one by one: there may be too many, or one is faulty
            return {entry: array for single in group for entry, array in _read_group([single], types).items()}
        raise _fault(group[0].file, error) from error
    try:
        arrays |= {entry: arrays[entry].astype(types[entry]) for entry in group if entry in types}
        mx.eval(list(arrays.values()))
    except _FAULTS as error:
        check_readable(group)  # raises the proper error
        raise _fault(group[0].file, error) from error
    return arrays


def _opened(group: list[HeaderEntry]) -> dict[HeaderEntry, mx.array]:
    """Returns the arrays, not read yet: each keeps its file open."""
    files = {path: mx.load(_source(path), format="safetensors") for path in {entry.file for entry in group}}
    return {entry: cast("dict[str, mx.array]", files[entry.file]).pop(entry.key) for entry in group}


def reading_fault(opened: OpenedModel, error: Exception) -> ModelError:
    """Returns the error for a lazy array that could not be read. Raises the proper one if a file of the model has
    changed since it was opened."""
    for path in {part.file for part in parts_of(opened)}:
        read_header(path)
    return ModelError(f"read {opened.name}: {error}")


def _fault(path: Path, error: Exception) -> ModelError:
    read_header(path)  # raises the proper error if the file was truncated or removed since it was opened
    return ModelError(f"read {path}: {error}")


def _source(path: Path) -> str | BinaryIO:
    """Returns the file for MLX: its name or, if that is not UTF-8, the open file, which is slower."""
    name = str(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        return path.open("rb")
    return name
