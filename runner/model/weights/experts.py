"""Converts between the layouts of a layer's experts: a tensor for each expert, or one stack of all experts.

A module's `sanitize` knows only one of the two. Ollama stacks experts that are separate in the source, and has named
the stacks differently over time (docs/internals/store.md, 1.6 and 3).
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import mlx.core as mx

from runner.errors import ModelError

Weights = dict[str, mx.array]
ExpertLayout = Literal["as stored", "apart", "stacked"]
_STACKED = re.compile(r"(.+)\.(experts|shared_experts|switch_mlp)\.(\w+)\.weight")
_APART = re.compile(r"(.+)\.(experts|shared_experts|switch_mlp)\.(\d+)\.(\w+)\.weight")


def possible_layouts(module: str, weights: Weights) -> list[ExpertLayout]:
    """Returns the layouts in which the module's `sanitize` may know these tensors, the cheapest first."""
    if not any(_stack(name, array) or _APART.fullmatch(name) for name, array in weights.items()):
        return ["as stored"]
    if module == "qwen3_next":
        # The module's sanitize converts norms and convolutions only if experts are apart. Old imports are converted
        # already.
        raw = any("conv1d.weight" in name and array.shape[-1] != 1 for name, array in weights.items())
        return ["apart" if raw else "stacked"]
    return ["stacked", "apart", "as stored"]


@contextmanager
def with_layout(weights: Weights, layout: ExpertLayout, rename: Callable[[str], str] = str) -> Iterator[Weights]:
    """Yields `weights` in `layout`, for the caller to pass to `sanitize`. Inside the block, stacking all slices of a
    stack copies nothing. The arrays are new objects, because some of mlx-lm's methods change arrays in place (`array *=
    factor`). `rename` changes the names of stacks."""
    slices = _StackSlices()
    own = {name: mx.array(array) for name, array in weights.items()}
    genuine = mx.stack
    mx.stack = slices.stack  # type: ignore[assignment]  # for mlx-lm's sanitize methods, on the thread that owns MLX
    try:
        yield slices.apart(own) if layout == "apart" else _stacked(own, rename) if layout == "stacked" else own
    finally:
        mx.stack = genuine


class _StackSlices:
    """Cuts stacks into slices, and has a substitute for `mx.stack` that returns the original stack for all its slices.

    The substitute recognises slices by identity, so `sanitize` must not change a slice in place. No module does.
    """

    def __init__(self) -> None:
        self._stack = mx.stack
        self._origins: dict[int, tuple[mx.array, mx.array, int]] = {}  # keeps the slices, so that their ids stay unique

    def apart(self, weights: Weights) -> Weights:
        """Returns `weights` with every stack [E, ...] cut into E slices, which are named as in the source."""
        result: Weights = {}
        for name, array in weights.items():
            stack = _stack(name, array)
            if stack is None:
                result[name] = array
                continue
            head, group, projection = stack.groups()
            group = "experts" if group == "switch_mlp" else group
            for index in range(array.shape[0]):
                result[f"{head}.{group}.{index}.{projection}.weight"] = part = array[index]
                self._origins[id(part)] = (part, array, index)
        return result

    def stack(self, arrays: Sequence[mx.array], axis: int = 0) -> mx.array:
        origins = [self._origins.get(id(array)) for array in arrays]
        whole = origins[0][1] if origins and origins[0] else None
        in_order = (origin and origin[1] is whole and origin[2] == index for index, origin in enumerate(origins))
        if whole is not None and axis == 0 and len(origins) == whole.shape[0] and all(in_order):
            return whole
        return self._stack(list(arrays), axis)


def _stacked(weights: Weights, rename: Callable[[str], str]) -> Weights:
    """Returns `weights` with all experts in stacks, under mlx-lm's usual names. Raises ModelError if an expert is
    missing."""
    result: Weights = {}
    parts: dict[str, dict[int, mx.array]] = {}
    for name, array in weights.items():
        index = None
        if match := _stack(name, array):
            head, group, projection = match.groups()
        elif match := _APART.fullmatch(name):
            head, group, index, projection = match.groups()
        else:
            result[name] = array
            continue
        group = "switch_mlp" if group == "experts" else group
        stack = f"{head}.{group}.{projection}.weight"
        if index is None:
            result[rename(stack)] = array
        else:
            parts.setdefault(stack, {})[int(index)] = array
    for stack, experts in parts.items():
        missing = next((index for index in range(len(experts)) if index not in experts), None)
        if missing is not None:
            raise ModelError(f"expert {missing} of {stack} is missing")
        result[rename(stack)] = mx.stack([experts[index] for index in range(len(experts))])
    return result


def _stack(name: str, array: mx.array) -> re.Match[str] | None:
    return _STACKED.fullmatch(name) if array.ndim == 3 else None
