"""The experts of a layer: a tensor each, or all of them stacked; a module's `sanitize` knows one of the two forms.

Ollama stacks what its source kept apart, and named the stacks differently over time (docs/internals/store.md, 1.6 and
3).
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
    """The forms in which `sanitize` may know these tensors, the one that costs least first."""
    if not any(_stack(name, array) or _APART.fullmatch(name) for name, array in weights.items()):
        return ["as stored"]
    if module == "qwen3_next":
        # Its sanitize converts norms and convolutions where it sees experts apart, else nothing. Old imports did it.
        raw = any("conv1d.weight" in name and array.shape[-1] != 1 for name, array in weights.items())
        return ["apart" if raw else "stacked"]
    return ["stacked", "apart", "as stored"]


@contextmanager
def with_layout(weights: Weights, layout: ExpertLayout, rename: Callable[[str], str] = str) -> Iterator[Weights]:
    """`weights` in the form of `layout`, for a `sanitize` to change; inside, a stack put together again costs nothing.

    The arrays are objects of their own: some of mlx-lm's methods say `array *= factor`, which changes the object.
    `rename` is for the names of new stacks.
    """
    cuts = _Cuts()
    own = {name: mx.array(array) for name, array in weights.items()}
    genuine = mx.stack
    mx.stack = cuts.stack  # type: ignore[assignment]  # for mlx-lm's sanitize methods, on the thread that owns MLX
    try:
        yield cuts.apart(own) if layout == "apart" else _stacked(own, rename) if layout == "stacked" else own
    finally:
        mx.stack = genuine


class _Cuts:
    """Slices of stacks, and the `mx.stack` that makes the whole of them again: the whole itself, without a copy.

    A slice is known by its identity, so no `sanitize` may change one in place. None does.
    """

    def __init__(self) -> None:
        self._stack = mx.stack
        self._origins: dict[int, tuple[mx.array, mx.array, int]] = {}  # holds the slices, so that their ids stay theirs

    def apart(self, weights: Weights) -> Weights:
        """Every stack [E, ...] as E slices, named as their source named them."""
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
    """Every stack, and experts apart as a new one, under mlx-lm's usual name. ModelError for an expert that lacks."""
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
        lacking = next((index for index in range(len(experts)) if index not in experts), None)
        if lacking is not None:
            raise ModelError(f"expert {lacking} of {stack} is missing")
        result[rename(stack)] = mx.stack([experts[index] for index in range(len(experts))])
    return result


def _stack(name: str, array: mx.array) -> re.Match[str] | None:
    return _STACKED.fullmatch(name) if array.ndim == 3 else None
