"""Reads the separate experts of a checkpoint directly into the stacks that a module needs.

Hugging Face stores one tensor per expert. mlx-lm's `sanitize` stacks these tensors, which copies every byte. Here all
experts of a stack are read into one array, as if the file held a stack (`experts.with_layout`).
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import BinaryIO, cast

import mlx.core as mx

from runner.errors import ModelError
from runner.model.opened import OpenedModel
from runner.model.sources.checkpoint import LogicalTensor
from runner.model.sources.safetensors import HeaderEntry
from runner.model.weights.assembly import has_source_names
from runner.model.weights.experts import ExpertLayout, with_layout
from runner.model.weights.packed import Arrays, Recipe
from runner.model.weights.reading import Headers, check_unchanged, read_data

ExpertStacks = dict[str, list[LogicalTensor]]
"""Name of a stack, in Ollama's style -> the tensors of its experts, in order."""

_EXPERT = re.compile(r"(.+experts)\.(\d+)\.(\w+\.weight)")
_THREADS = 4
"""The number of reading threads, equal to MLX's. Each thread has one file open, and never calls MLX."""
_KEY = "stack"


def find_expert_stacks(opened: OpenedModel, recipe: Recipe) -> tuple[ExpertStacks, Recipe]:
    """Returns the stacks to read, and the recipe for the model with these stacks instead of separate experts.

    Returns no stacks, and `recipe` unchanged, if stacks would change the names that `sanitize` sees.
    """
    numbered: dict[str, dict[int, LogicalTensor]] = {}
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


def outside_stacks(tensors: Mapping[str, LogicalTensor], stacks: ExpertStacks) -> dict[str, LogicalTensor]:
    """Returns the tensors that belong to none of the stacks."""
    experts = {tensor.name for members in stacks.values() for tensor in members}
    return {name: tensor for name, tensor in tensors.items() if name not in experts}


def _are_alike(experts: Sequence[LogicalTensor]) -> bool:
    forms = {tuple(part and (part.dtype, part.shape) for part in tensor[1:]) for tensor in experts}
    return len(experts) > 1 and len(forms) == 1 and experts[0].nbytes > 0


def _seen(shapes: Mapping[str, tuple[int, ...]], layout: ExpertLayout) -> set[str]:
    """Returns the names that `sanitize` sees for tensors of these shapes in `layout`."""
    placeholders = {name: mx.zeros((*shape[:1], *[1] * len(shape[1:]))) for name, shape in shapes.items()}
    with with_layout(placeholders, layout) as named:
        return set(named)


class ExpertReader:
    """Reads stacks of experts with a pool of threads. Only the thread that owns MLX may use it. Must be closed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, "reader")
        self._seen: Headers = {}

    def close(self) -> None:
        self._pool.shutdown()

    def read_stack(self, experts: Sequence[LogicalTensor]) -> Arrays:
        """Returns the evaluated arrays [E, ...] of a stack of experts. Raises ModelError with the name of a bad
        file."""
        words, *companions = zip(*(tensor[1:] for tensor in experts), strict=True)
        return Arrays(self._stack(words), *(self._stack(parts) if parts[0] else None for parts in companions))

    def _stack(self, parts: Sequence[HeaderEntry]) -> mx.array:
        for part in parts:
            check_unchanged(part, self._seen)
        file = _GatheredFile(parts, self._pool)
        try:
            return cast("dict[str, mx.array]", mx.load(cast("BinaryIO", file), format="safetensors"))[_KEY]
        except RuntimeError as error:
            raise file.error or ModelError(f"read {parts[0].file}: {error}") from error


class _GatheredFile:
    """A file object that `mx.load` reads as a safetensors file with one array. The array's data comes from all `parts`.

    MLX calls `readinto` from one of MLX's threads, with the memory for the whole array.
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
            for _ in self._pool.map(read_data, self._parts, repeat(0), pieces):
                pass
        except ModelError as error:
            self.error = error
            return 0
        return len(memory)
