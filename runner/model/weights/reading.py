"""Reads the arrays of an opened model from its files: in groups, or experts into their stacks.

Every array is made, read and evaluated on the thread that calls these functions; the reader of experts has threads of
its own, which only read files.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import BinaryIO, cast

import mlx.core as mx

from runner.errors import ModelError
from runner.model.opened import OpenedModel
from runner.model.progress import Progress
from runner.model.sources.checkpoint import Tensor
from runner.model.sources.safetensors import HeaderEntry, os_reason, read_tensor_header
from runner.model.weights.assembly import has_source_names, map_arrays
from runner.model.weights.dtype import DtypePlan
from runner.model.weights.experts import ExpertLayout, with_layout
from runner.model.weights.packed import Arrays, Recipe

_READ_FILES = 60
"""A lazy array keeps its file open, MLX's four readers do so a little longer, and macOS allows 256 open files."""
_READ_BYTES = 512 << 20
"""Readers wait for each other at the end of a group, so there should be few; but the log shows progress by groups."""

_CHECKED_BYTES = 8 << 20
Headers = dict[Path, frozenset[HeaderEntry]]
FAULTS = (RuntimeError, KeyError, OSError)
"""The exceptions of a file that MLX cannot read."""


def read_arrays(opened: OpenedModel, types: DtypePlan, progress: Progress) -> dict[str, Arrays]:
    """Reads the arrays of every needed tensor, in bounded groups."""
    early_types = {
        part.weight: early for name, part in opened.tensors.items() if (early := types.early_dtype(name, part))
    }
    return map_arrays(opened, read_entries(parts_of(opened), early_types, progress.add).__getitem__)


def read_entries(
    entries: Iterable[HeaderEntry], types: Mapping[HeaderEntry, mx.Dtype], done: Callable[[int], None]
) -> dict[HeaderEntry, mx.array]:
    """Reads arrays, converted to their `types` if given, in bounded groups. Calls `done` with the bytes of each."""
    loaded: dict[HeaderEntry, mx.array] = {}
    for group in _groups(entries):
        loaded |= _read_group(group, types)
        done(sum(entry.nbytes for entry in group))
    return loaded


def check_readable(entries: Iterable[HeaderEntry]) -> None:
    """Reads the data of these arrays once, and drops it. Raises a ModelError that names the first faulty file.

    After a lazy read that failed, MLX (0.32) may miscount what its threads have to do, and a later evaluation waits for
    ever. So whatever the runner can do without is read like this before MLX reads it, from the system's memory then.
    """
    seen: Headers = {}
    buffer = memoryview(bytearray(_CHECKED_BYTES))
    for entry in entries:
        _check_unchanged(entry, seen)
        for at in range(0, entry.nbytes, _CHECKED_BYTES):
            _read(entry, at, buffer[: entry.nbytes - at])


def _check_unchanged(entry: HeaderEntry, seen: Headers) -> None:
    """Raises ModelError if the array is not where it was when the model was opened. `seen`: headers read already."""
    if entry.file not in seen:
        seen[entry.file] = frozenset(read_tensor_header(entry.file).values())
    if entry not in seen[entry.file]:
        raise ModelError(f"{entry.file}: tensor {entry.key} has changed since the model was opened")


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
        arrays = open_entries(group)
    except FAULTS as error:
        if len(group) > 1:  # again one by one: there may be too many, or one is faulty
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
    """Returns arrays that are read when they are evaluated. Until then each keeps its file open."""
    files = {path: mx.load(_source(path), format="safetensors") for path in {entry.file for entry in group}}
    return {entry: cast("dict[str, mx.array]", files[entry.file]).pop(entry.key) for entry in group}


def file_fault(path: Path, error: Exception) -> ModelError:
    """Returns the error for a file that MLX could not read."""
    read_tensor_header(path)  # raises the proper error if the file was truncated or removed since it was opened
    return ModelError(f"read {path}: {error}")


def _source(path: Path) -> str | BinaryIO:
    """Returns the file for MLX: its name or, if that is not UTF-8, the open file, which is slower."""
    name = str(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        return path.open("rb")
    return name


# --- Reads separate experts of a checkpoint straight into the stacks that a module needs. Hugging Face stores one
# tensor per expert, and mlx-lm's `sanitize` stacks them, which would copy every byte after reading it. Here all
# experts of a stack are read into one array, which is then treated as if it were stored stacked
# (`experts.with_layout`).

ExpertStacks = dict[str, list[Tensor]]
"""Name of a stack, as Ollama would call it -> its experts, in order."""

_EXPERT = re.compile(r"(.+experts)\.(\d+)\.(\w+\.weight)")
_THREADS = 4
"""As many as MLX reads with; each has one file open. They only read files and never call MLX."""
_KEY = "stack"


def find_expert_stacks(opened: OpenedModel, recipe: Recipe) -> tuple[ExpertStacks, Recipe]:
    """Returns the stacks to read, and the recipe for the model with these stacks instead of separate experts.

    Returns no stacks if `sanitize` would then see other names than when `recipe` was found.
    """
    numbered: dict[str, dict[int, Tensor]] = {}
    for name, tensor in opened.tensors.items() if has_source_names(opened) else ():
        if name not in recipe.unpacked and (match := _EXPERT.fullmatch(name)):
            head, number, tail = match.groups()
            numbered.setdefault(f"{head}.{tail}", {})[int(number)] = tensor
    stacks = {name: [experts[number] for number in sorted(experts)] for name, experts in numbered.items()}
    stacks = {name: experts for name, experts in stacks.items() if _are_alike(experts)}
    shapes = {name: tensor.weight.shape for name, tensor in opened.tensors.items()}
    stacked = {name: shapes[name] for name in outside_stacks(opened.tensors, stacks)}
    stacked |= {name: (len(experts), *experts[0].weight.shape) for name, experts in stacks.items()}
    layout: ExpertLayout = "apart" if recipe.layout == "as stored" else recipe.layout
    if not stacks or _seen(stacked, layout) != _seen(shapes, recipe.layout):
        return {}, recipe
    return stacks, recipe._replace(layout=layout)


def outside_stacks(tensors: Mapping[str, Tensor], stacks: ExpertStacks) -> dict[str, Tensor]:
    """Returns those of `tensors` that are in no stack."""
    experts = {tensor.name for members in stacks.values() for tensor in members}
    return {name: tensor for name, tensor in tensors.items() if name not in experts}


def _are_alike(experts: Sequence[Tensor]) -> bool:
    forms = {tuple(part and (part.dtype, part.shape) for part in tensor[1:]) for tensor in experts}
    return len(experts) > 1 and len(forms) == 1 and experts[0].nbytes > 0


def _seen(shapes: Mapping[str, tuple[int, ...]], layout: ExpertLayout) -> set[str]:
    """Returns the names that `sanitize` sees."""
    placeholders = {name: mx.zeros((*shape[:1], *[1] * len(shape[1:]))) for name, shape in shapes.items()}
    with with_layout(placeholders, layout) as named:
        return set(named)


class ExpertReader:
    """Reads stacks of experts with threads of its own. Owner: the thread that owns MLX. Must be closed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, "reader")
        self._seen: Headers = {}

    def close(self) -> None:
        self._pool.shutdown()

    def read(self, experts: Sequence[Tensor]) -> Arrays:
        """Returns the arrays of the stack [E, ...], evaluated. Raises a ModelError that names the faulty file."""
        words, *companions = zip(*(tensor[1:] for tensor in experts), strict=True)
        return Arrays(self._read(words), *(self._read(parts) if parts[0] else None for parts in companions))

    def _read(self, parts: Sequence[HeaderEntry]) -> mx.array:
        for part in parts:
            _check_unchanged(part, self._seen)
        file = _GatheredFile(parts, self._pool)
        try:
            return cast("dict[str, mx.array]", mx.load(cast("BinaryIO", file), format="safetensors"))[_KEY]
        except RuntimeError as error:
            raise file.error or ModelError(f"read {parts[0].file}: {error}") from error


class _GatheredFile:
    """A file object that `mx.load` reads as a safetensors file with one array, gathered from many places.

    MLX calls `readinto` from a thread of its own, with the memory of the whole array.
    """

    closed = False

    def __init__(self, parts: Sequence[HeaderEntry], pool: ThreadPoolExecutor) -> None:
        self._parts = parts
        self._pool = pool
        self._part_bytes = parts[0].nbytes
        array = {
            "dtype": parts[0].dtype,
            "shape": (len(parts), *parts[0].shape),
            "data_offsets": (0, len(parts) * self._part_bytes),
        }
        text = json.dumps({_KEY: array}).encode()
        self._head = len(text).to_bytes(8, "little") + text
        self._position = 0
        self.error: ModelError | None = None

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        end = len(self._head) + len(self._parts) * self._part_bytes
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: end}[whence]
        return self._position

    def readinto(self, memory: memoryview) -> int:
        start, self._position = self._position, self._position + len(memory)
        if start < len(self._head):
            memory[:] = self._head[start : self._position]
            return len(memory)
        pieces = (memory[at : at + self._part_bytes] for at in range(0, len(memory), self._part_bytes))
        try:
            for _ in self._pool.map(_read, self._parts, repeat(0), pieces):
                pass
        except ModelError as error:
            self.error = error
            return 0
        return len(memory)


def _read(part: HeaderEntry, at: int, memory: memoryview) -> None:
    """Fills `memory` with the data of an array from byte `at` on."""
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
