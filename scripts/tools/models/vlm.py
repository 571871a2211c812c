"""Every package of mlx-vlm that answers as a tiny model with random weights, made from its own configuration classes.

`vlm.toml` has the values that texts do not have; `values.toml` has those. Needs mlx-vlm.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.base import Module
from mlx.nn.layers.convolution import Conv2d
from mlx.utils import tree_unflatten

from runner.model.weights.parameters import parameters_of
from runner.vlm.module import Served, import_package, make_module
from scripts.tools.models import data
from scripts.tools.models.architectures import LARGEST, Cut, values, weight
from scripts.tools.models.tiny import Tiny

Values = dict[str, Any]
_TABLES = data.read("vlm")


def config(package: str) -> Values:
    """The tiny `config.json` of a package. Makes the sizes small that its classes have fixed, too."""
    classes, own = import_package(package), _own(package)
    _shrink(package)
    text = {**values(package), **_TABLES["text"], "model_type": package, **own.get("text", {})}
    made = _filled(classes.ModelConfig, {**text, **_TABLES["top"], **own.get("top", {})})
    if own.get("flat"):
        made |= text
    for part, filling in (("text", text), ("vision", _TABLES["vision"] | own.get("vision", {}))):
        kind = getattr(classes, f"{part.title()}Config", None)
        if kind is not None and f"{part}_config" in inspect.signature(classes.ModelConfig).parameters:
            made[f"{part}_config"] = _filled(kind, {"model_type": package, **filling})
    return {**made, "model_type": package, **own.get("as_is", {})}


def make(package: str) -> Served:
    """The model of a package, the same weights every time, scaled so that the context decides the next token.

    Raises ValueError for a model that is not tiny, and whatever the package itself raises.
    """
    return filled(package, config(package))


def filled(name: str, chosen: Values) -> Served:
    """The same with this config."""
    mx.random.seed(7)  # for the parameters that stay as a class makes them
    model = make_module(name, chosen)
    size = sum(array.size for array in parameters_of(model).values())
    if size > _own(name).get("largest", LARGEST):
        raise ValueError(f"{name} has {size} parameters: a size is missing in vlm.toml")
    mx.disable_compile()
    mx.random.seed(7)
    scale = cast("float", _own(name).get("embeddings", 1.0))
    made = {path: weight(path, each) for path, each in parameters_of(model).items()}
    made = {path: each * scale if path.endswith("embed_tokens.weight") else each for path, each in made.items()}
    model.update(tree_unflatten([*made.items()]))
    model.eval()
    mx.eval(parameters_of(model))
    return model


def build(package: str) -> Tiny:
    """The same as a text model."""
    return tiny_of(package, make(package))


def tiny_of(package: str, model: Module) -> Tiny:
    """The same of a module that is there, its logits cut to the vocabulary of other tiny models."""
    served = cast("Served", model)
    return Tiny(package, Cut(served), served.make_cache, 1e-3)


@cache
def _shrink(package: str) -> None:
    """Makes small, in this process, what the classes of a package have fixed: attributes of a class, and arguments that
    it is made with."""
    for path, sizes in _own(package).get("fixed", {}).items():
        module, _, name = path.rpartition(".")
        owner = import_package(module)
        kind = getattr(owner, name)
        arguments = inspect.signature(kind).parameters
        made = {argument: value for argument, value in sizes.items() if argument in arguments}
        for attribute, value in sizes.items():
            if attribute not in made:
                setattr(kind, attribute, SimpleNamespace(**value) if isinstance(value, dict) else value)
        if made:
            setattr(owner, name, _with(kind, **made))
    for name, channels in _own(package).get("channels", {}).items():
        cast("Any", import_package(name)).nn = _narrow({int(count): fewer for count, fewer in channels.items()})


def _narrow(channels: Mapping[int, int]) -> SimpleNamespace:
    """Returns a `mlx.nn` whose convolutions have fewer channels instead of these."""

    def convolution(inputs: int, outputs: int, **others: Any) -> Conv2d:
        return Conv2d(channels.get(inputs, inputs), channels.get(outputs, outputs), **others)

    return SimpleNamespace(**{**vars(nn), "Conv2d": convolution})


def _with(kind: Callable[..., object], **sizes: object) -> Callable[..., object]:
    return lambda *args, **others: kind(*args, **{**others, **sizes})


def _own(package: str) -> Values:
    return cast("Values", _TABLES.get(f"own-{package}", {}))


def _filled(kind: type, filling: Mapping[str, object]) -> Values:
    names = inspect.signature(kind).parameters
    return {name: copy.deepcopy(filling[name]) for name in names if name in filling}
