"""Loads the weights of an opened model, in bounded groups, into an mlx-lm module.

Owner: the engine thread. Every array is made, read and evaluated on the thread that calls `load`.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear

from runner.errors import ModelError, ReadError
from runner.logs import Log
from runner.model.families import UNBATCHABLE, UNDRAFTABLE
from runner.model.opened import OpenedModel
from runner.model.progress import Progress
from runner.model.sources.checkpoint import Tensor
from runner.model.sources.header import HeaderEntry, data_starts, os_reason
from runner.model.weights.assemble import assemble, has_source_names, rehearse
from runner.model.weights.dtype import DtypePlan, plan_dtypes
from runner.model.weights.experts import ExpertLayout, with_layout
from runner.model.weights.packed import Arrays, Recipe
from runner.model.weights.parameters import parameters_of
from runner.model.weights.reading import read_arrays
from runner.model.weights.unpack import unpack_layers

log = Log(__name__)

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
        self._starts: dict[Path, dict[HeaderEntry, int]] = {}

    def close(self) -> None:
        self._pool.shutdown()

    def read(self, experts: Sequence[Tensor]) -> Arrays:
        """Returns the arrays of the stack [E, ...], evaluated. Raises a ModelError that names the faulty file."""
        words, *companions = zip(*(tensor[1:] for tensor in experts), strict=True)
        return Arrays(self._read(words), *(self._read(parts) if parts[0] else None for parts in companions))

    def _read(self, parts: Sequence[HeaderEntry]) -> mx.array:
        file = _GatheredFile(parts, [self._start(part) for part in parts], self._pool)
        try:
            return cast("dict[str, mx.array]", mx.load(cast("BinaryIO", file), format="safetensors"))[_KEY]
        except RuntimeError as error:
            raise file.error or ModelError(f"read {parts[0].file}: {error}") from error

    def _start(self, part: HeaderEntry) -> int:
        """Returns the position in its file at which the data of `part` begins."""
        if part.file not in self._starts:
            self._starts[part.file] = data_starts(part.file)
        start = self._starts[part.file].get(part)
        if start is None:
            raise ModelError(f"{part.file}: tensor {part.key} has changed since the model was opened")
        return start


class _GatheredFile:
    """A file object that `mx.load` reads as a safetensors file with one array, gathered from many places.

    MLX calls `readinto` from a thread of its own, with the memory of the whole array.
    """

    closed = False

    def __init__(self, parts: Sequence[HeaderEntry], starts: Sequence[int], pool: ThreadPoolExecutor) -> None:
        self._parts = parts
        self._starts = starts
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
            for _ in self._pool.map(_read, self._parts, self._starts, pieces):
                pass
        except ModelError as error:
            self.error = error
            return 0
        return len(memory)


def _read(part: HeaderEntry, start: int, memory: memoryview) -> None:
    try:
        with part.file.open("rb", buffering=0) as file:
            file.seek(start)
            while memory:
                count = file.readinto(memory)
                if not count:
                    raise ModelError(f"{part.file}: tensor {part.key}: the file ends within its data")
                memory = memory[count:]
    except OSError as error:
        raise ModelError(f"read {part.file}: {os_reason(error)}") from error


_MADE_BYTES = 64 << 20
"""Results of computing with arrays take memory beside their sources until their group is evaluated."""


class LoadedModel(NamedTuple):
    """A model ready to run, on the thread that loaded it."""

    module: Module
    suppressed: tuple[int, ...] = ()
    """Tokens that must never be chosen."""

    @property
    def unbatchable(self) -> str:
        """The reason why this model cannot compute several rows in one forward; empty if none is known."""
        return UNBATCHABLE.get(type(self.module).__module__.rpartition(".")[2], "")

    @property
    def undraftable(self) -> str:
        """The reason why answers of this model cannot be drafted; empty if none is known."""
        return UNDRAFTABLE.get(type(self.module).__module__.rpartition(".")[2], "")

    @property
    def has_16_bit_experts(self) -> bool:
        """True if there are unpacked 16-bit experts, which MLX refuses to multiply on a CPU at the first forward."""
        experts = (layer for layer in self.module.modules() if type(layer) is SwitchLinear)
        return any(layer.weight.dtype in (mx.bfloat16, mx.float16) for layer in experts)

    @property
    def dtypes(self) -> list[str]:
        """The types of the parameters in memory."""
        return sorted({str(array.dtype) for array in parameters_of(self.module).values()})

    def make_layers(self) -> list[object]:
        """Returns fresh layer caches for one sequence, one per layer with state."""
        return list(make_prompt_cache(self.module))

    def logits(self, tokens: mx.array, layers: list[object]) -> mx.array:
        """Runs `tokens` [B, L] on top of the state in `layers`, and advances it. Returns lazy scores [B, L, V]."""
        scores = cast("mx.array", self.module(tokens, cache=layers))
        return scores.at[..., mx.array(self.suppressed)].minimum(-mx.inf) if self.suppressed else scores


def load(
    opened: OpenedModel,
    dtype: str = "keep",
    budget_bytes: int | None = None,
    *,
    slow_blas: bool = False,
    group: mx.distributed.Group | None = None,
) -> LoadedModel:
    """Reads the weights and builds the module.

    Shapes, names, types and sizes are checked before the first byte is read. `dtype` is one of `settings.DTYPES`; the
    log tells its meaning for this model. `slow_blas` is as in `plan_dtypes`. With a `group`, whose ranks must all
    call this, only the share of this rank is kept, and the smallest of their budgets is for each share.

    Raises:
        ModelError: a file or tensor does not fit, the weights exceed the budget, or the group cannot share the model.
        ReadError: reading failed after these checks.
    """
    if group is not None:
        from runner.model.weights.split import load_share  # most models are not shared

        return LoadedModel(load_share(opened, dtype, budget_bytes, group), tuple(opened.suppressed_tokens))
    rehearsed, recipe = rehearse(opened)
    types = plan_dtypes(dtype, rehearsed, budget_bytes, slow_blas=slow_blas)
    types.log_choice()
    if too_large := types.over_budget(budget_bytes, rehearsed):
        raise ModelError(too_large)
    del rehearsed
    try:
        module = _filled(opened, recipe, types)
    except ModelError as error:
        raise ReadError(str(error)) from error
    settle(module, types)
    return LoadedModel(module, tuple(opened.suppressed_tokens))


def settle(module: Module, types: DtypePlan) -> None:
    """Converts the parameters of a module whose arrays have been read as `types` says, and evaluates all of it."""
    # The results of sanitize are still lazy, and nothing else holds the arrays that were read: evaluating a group frees
    # the arrays from which it is made.
    waiting = [*parameters_of(module).items()][::-1]
    group: list[tuple[str, mx.array]] = []
    group_bytes = 0
    while waiting:
        name, array = waiting.pop()
        array = array.astype(types.dtype_of(name, array.dtype))
        group.append((name, array))
        group_bytes += array.nbytes
        if group_bytes >= _MADE_BYTES or not waiting:
            del array
            if types.dtype is not None:
                module.load_weights(group, strict=False)
            mx.eval([array for _, array in group])
            group, group_bytes = [], 0
    mx.eval(module.state)
    if types.unpacked:
        unpack_layers(module, types.unpacked)


def _filled(opened: OpenedModel, recipe: Recipe, types: DtypePlan) -> Module:
    """Returns the module with all bytes read; results computed from them may still be lazy."""
    progress = Progress(log, "loading", opened.total_bytes)
    stacks, recipe = find_expert_stacks(opened, recipe)
    arrays: dict[str, Arrays] = {}
    with closing(ExpertReader()) as reader:
        for name, experts in stacks.items():
            arrays[name] = stack = reader.read(experts)
            if early := types.early_dtype(name, experts[0]):
                arrays[name] = stack._replace(weight=stack.weight.astype(early))
                del stack
                mx.eval(arrays[name].weight)
            progress.add(sum(tensor.nbytes for tensor in experts))
    rest = opened._replace(tensors=outside_stacks(opened.tensors, stacks))
    arrays |= read_arrays(rest, types, progress)
    return assemble(opened, arrays, recipe)
