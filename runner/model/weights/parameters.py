"""Checks the parameters of a module, and changes its submodules: for fast lookups, early computing, or observing."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from runner.errors import FaultsError, ModelError
from runner.model.opened import OpenedModel
from runner.sizes import listed

_LISTED = 6
"""The most tensors that a message names; it only counts the rest."""
_PIECE = 1 << 24
"""The most numbers of a parameter that are checked in one piece."""
_BLOCK = re.compile(r"(?:.+\.)?layers\.\d+\.")


def parameters_of(module: Module) -> dict[str, mx.array]:
    """Returns the parameters of a module by name."""
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters())))


def refuse_infinite(module: Module) -> None:
    """Raises ModelError if a parameter holds NaN or infinity. Checks a parameter piece by piece."""
    found = [name for name, array in parameters_of(module).items() if not _is_finite(array)]
    if found:
        raise ModelError(
            f"tensor {listed(found, 1)}: want numbers, found NaN or infinity: fetch the model again, or omit"
            " --dtype float16 if its numbers exceed that type"
        )


def _is_finite(array: mx.array) -> bool:
    if not mx.issubdtype(array.dtype, mx.floating):
        return True
    numbers = array.reshape(-1)
    pieces = (numbers[at : at + _PIECE] for at in range(0, numbers.size, _PIECE))
    return all(mx.isfinite(piece).all().item() for piece in pieces)


def shorten_lookups(module: Module) -> None:
    """Makes the submodules of a module ordinary attributes too. Called after the module is complete.

    MLX's modules are dictionaries. MLX finds their contents in a `__getattr__` in Python, which needs a fifth of the
    time of building a forward of one token. Parameters stay only in the dictionary. Replace a submodule by
    `replace_submodule`.
    """
    for each in module.modules():
        for name, value in each.items():
            if isinstance(value, Module | list | dict) and not isinstance(getattr(type(each), name, None), property):
                object.__setattr__(each, name, value)


def dispatch_early(module: Module) -> None:
    """Lets a CPU compute each layer of a complete module while Python builds the next one. Otherwise the CPU waits 3 to
    5 ms for the whole forward to be built. Skips the last layer: a part of a prompt does not need its output."""
    for layer in [*getattr(module, "layers", ())][:-1]:
        if isinstance(layer, Module):
            layer.__class__ = observed(type(layer), mx.async_eval)


@contextmanager
def building_only(module: Module) -> Iterator[None]:
    """A block in which forwards of the module are only built: `dispatch_early` has no effect inside the block."""
    layers = [(layer, type(layer)) for layer in getattr(module, "layers", ()) if isinstance(layer, Module)]
    for layer, kind in layers:
        layer.__class__ = next(each for each in kind.__mro__ if "observes" not in vars(each))
    try:
        yield
    finally:
        for layer, kind in layers:
            layer.__class__ = kind


def observed(plain: type[Module], see: Callable[[mx.array], None]) -> type[Module]:
    """Returns a subclass of `plain` whose forwards also pass their result to `see`: an array, or the first of several
    values if that value is an array."""

    def call(self: Module, *args: object, **kwargs: object) -> object:
        output = plain.__call__(self, *args, **kwargs)
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(first, mx.array):
            see(first)
        return output

    return type(plain.__name__, (plain,), {"__call__": call, "observes": True})


def replace_submodule(owner: Module, name: str, value: Module) -> None:
    """Replaces the submodule `name` of `owner`. Works before and after `shorten_lookups`."""
    owner[name] = value
    if name in vars(owner):
        object.__setattr__(owner, name, value)


def check_parameters(opened: OpenedModel, wanted: Mapping[str, mx.array], found: Mapping[str, mx.array]) -> None:
    """Compares the weights `found` with the parameters `wanted`: names, shapes, and floating-point types or not. Raises
    a FaultsError that lists missing tensors first, then other differences."""
    faults = []
    missing = _unexplained(wanted.keys() - found.keys(), opened.unreadable)
    if missing:
        faults.append(f"{opened.name} lacks {len(missing)} tensors: {listed(missing, _LISTED)}{_advice(opened)}")
    extra = sorted(found.keys() - wanted.keys())
    if extra:
        faults.append(
            f"{opened.name} holds {len(extra)} tensors that {opened.family.import_name} does not know: "
            f"{listed(extra, _LISTED)}{_advice(opened)}"
        )
    reported: set[str] = set()
    for name, want in wanted.items():
        have, path = found.get(name, want), name.rpartition(".")[0]
        if have.shape != want.shape:
            if path in reported and name.endswith((".scales", ".biases")):
                continue  # follows from the wrong shape of the words
            reported.add(path)
            faults.append(f"{tensor_place(opened, name)}: want shape {list(want.shape)}, found {list(have.shape)}")
        elif _is_float(have) != _is_float(want):
            what, found_type = (str(each.dtype).removeprefix("mlx.core.") for each in (want, have))
            what = "a floating-point type" if _is_float(want) else what
            faults.append(f"{tensor_place(opened, name)}: want {what}, found {found_type}")
    if faults:
        raise FaultsError([ModelError(fault) for fault in faults])


def _unexplained(missing: Iterable[str], unreadable: Iterable[str]) -> list[str]:
    """Returns the missing parameters that no unreadable tensor explains. `sanitize` may rename a tensor, so a tensor
    without a parameter of its name explains all missing parameters of its layer."""
    left = set(missing)
    for name in unreadable:
        stem = name.removesuffix(".weight")
        explained = {each for each in left if each == name or each.startswith(f"{stem}.")}
        if not explained:
            match = _BLOCK.match(name)
            explained = {each for each in left if each.startswith(match[0] if match else "")}
        left -= explained
    return sorted(left)


def _advice(opened: OpenedModel) -> str:
    """Returns advice if the config names a packing of another program; else an empty text."""
    declared = opened.config.get("quantization_config")
    method = declared.get("quant_method") if isinstance(declared, dict) else None
    return f" (its packing is {method!r}: convert it with mlx_lm.convert)" if method else ""


def _is_float(array: mx.array) -> bool:
    return bool(mx.issubdtype(array.dtype, mx.floating))


def tensor_place(opened: OpenedModel, name: str) -> str:
    """Returns the parameter `name` for a message, with its file if a tensor has the same name."""
    stem, _, last = name.rpartition(".")
    tensor = opened.tensors.get(name) or opened.tensors.get(f"{stem}.weight" if last in ("scales", "biases") else "")
    return f"tensor {name}" if tensor is None else f"{tensor.weight.file}: tensor {name}"
