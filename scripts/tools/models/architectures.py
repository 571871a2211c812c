"""Every architecture of the installed mlx-lm as a tiny model with random weights.

The list is read from the package; a module is imported when its model is built. What a configuration says comes from
`values.toml`: a quantity has many names, and an architecture may have values of its own. Hidden size 32, 4 layers, 64
tokens, windows of 32 tokens and chunks of 16, so that a prompt of 41 goes beyond both.
"""

import copy
import dataclasses
import importlib
import pkgutil
from collections.abc import Sequence
from functools import cache
from importlib.abc import InspectLoader
from importlib.util import find_spec
from types import ModuleType
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_map_with_path

import runner.process.lean_mlx_lm  # noqa: F401

import mlx_lm.models  # isort: skip
from mlx_lm.models.cache import make_prompt_cache  # isort: skip

from runner.model.architectures import ENCODERS
from runner.model.forwards import replace_forwards
from scripts.tools.models import data
from scripts.tools.models.tiny import Forward, Tiny

Values = dict[str, object]

_TABLES = data.read("values")
_NAMED = [row for rows in _TABLES["numbers"].values() for row in cast("list[tuple[object, str]]", rows)]
_SHARED: Values = {name: value for value, names in _NAMED for name in names.split()} | _TABLES["shared"]
VOCAB = cast("int", _SHARED["vocab_size"])

LARGEST = 4_000_000  # parameters; more means a size that the tables do not know

# Recurrent states that forget slowly, and what would drown them.
_LONG_MEMORY = {"A_log": -4.0, "w_lora.lora.2.bias": -6.0, "r_k": 0.0}

# What other boundaries of the forwards may change in the logits: a few times the noise of the model itself, measured.
_TOLERANCE = 1e-3
_TOLERANCES = {
    "deepseek_v41": 1e-2,  # rounds to 8 and 4 bits
    "longcat_flash": 1e-2,  # two attentions a layer, with latents scaled up
    "longcat_flash_ngram": 1e-2,
}

# Architectures of which the answer itself depends on the boundaries of the forwards, with any cache or none.
BOUNDARY_DEPENDENT = {
    "phi3small": "in every other layer the causal mask is added as 0 and 1, so that a token sees what follows it",
    "plamo3": "its mask shows one token more than its sliding window keeps",
}

# What does not run, and what its error says.
_BROKEN = {
    # Without the package ai2-olmo its import exits; with it, its forward adds the string "causal" to an array.
    "olmo": "ends the process"
}
_METAL_ONLY = {
    "bitnet": "No Metal back-end",  # a kernel for ternary weights
    "muse_spark": "No Metal back-end",  # kernels for norms, rotations and expert routing
}


def values(name: str) -> Values:
    """Returns every field that the tiny configuration of an architecture may have."""
    return {"model_type": name, **_SHARED, **_TABLES.get(f"own-{name}", {})}


@cache
def architectures() -> tuple[str, ...]:
    """The modules, mlx-lm's and ours, of models that answer, in alphabetical order. Imports none of them."""
    found = pkgutil.iter_modules(mlx_lm.models.__path__)
    return tuple(sorted({each.name for each in found if {"Model", "ModelArgs"} <= _names(each.name)} - ENCODERS))


def unserved() -> dict[str, str]:
    """The architectures that cannot run on this machine, and what their errors say."""
    return {**_BROKEN, **({} if mx.metal.is_available() else _METAL_ONLY)}


def config(name: str) -> Values:
    """The tiny `config.json` of an architecture. Raises ImportError when its module cannot be imported."""
    known = {field.name for field in dataclasses.fields(module_of(name).ModelArgs)}
    chosen = copy.deepcopy({key: value for key, value in values(name).items() if key in known | {"model_type"}})
    if "text_config" in known:
        chosen["text_config"] = copy.deepcopy(values(name))
    return chosen


def build(name: str) -> Tiny:
    """The model of an architecture with its layer caches, its logits cut to the vocabulary of the others.

    Raises what `make_module` does. Two of those in `unserved` are built, and raise in their forward.
    """
    return tiny_of(name, make_module(name))


def tiny_of(name: str, model: Module) -> Tiny:
    """The same of a module that is there."""
    return Tiny(name, Cut(model), lambda: list(make_prompt_cache(model)), _TOLERANCES.get(name, _TOLERANCE))


def make_module(name: str) -> Module:
    """mlx-lm's module, the same weights every time, scaled so that the context decides the next token.

    Raises ValueError for a model that is not tiny, and whatever the architecture itself raises.
    """
    module = module_of(name)
    model = module.Model(module.ModelArgs.from_dict(config(name)))
    size = sum(array.size for _, array in cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters())))
    if size > LARGEST:
        raise ValueError(f"{name} has {size} parameters: a size is missing in values.toml")
    mx.disable_compile()
    mx.random.seed(7)
    model.update(tree_map_with_path(weight, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return cast("Module", model)


class Cut:
    """A model whose vocabulary may be larger than that of the other tiny ones: the logits of the first tokens."""

    def __init__(self, model: Module) -> None:
        self._model = cast("Forward", model)
        self.layers: Sequence[object] = self._model.layers

    def __call__(self, inputs: mx.array, cache: list[object]) -> mx.array:
        return self._model(inputs, cache=cache)[..., :VOCAB]


def _names(name: str) -> frozenset[str]:
    """The names that the code of a module uses, without running it."""
    spec = find_spec(f"mlx_lm.models.{name}")
    code = spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, InspectLoader) else None
    return frozenset(code.co_names if code else ())


def module_of(name: str) -> ModuleType:
    """The module of an architecture. Raises ImportError when it cannot be imported."""
    try:
        module = importlib.import_module(f"mlx_lm.models.{name}")
    except SystemExit as error:
        raise ImportError(f"{name} ends the process when it is imported") from error
    replace_forwards()
    return module


def weight(path: str, fresh: mx.array) -> mx.array:
    """Returns random numbers in place of a fresh weight, scaled so that the context counts."""
    if fresh.dtype == mx.uint32:  # packed
        return mx.random.randint(0, 2**31 - 1, fresh.shape).astype(mx.uint32)
    if not mx.issubdtype(fresh.dtype, mx.floating):
        return fresh
    for ending, value in _LONG_MEMORY.items():
        if path.endswith(ending):
            return mx.full(fresh.shape, value, fresh.dtype)
    if not fresh.any():  # would keep a part of the model from doing anything
        return mx.random.normal(fresh.shape, fresh.dtype)
    if "norm" in path or fresh.ndim < 2:
        return fresh
    if "embed" in path and "proj" not in path:
        return mx.random.normal(fresh.shape, fresh.dtype)
    return mx.random.normal(fresh.shape, fresh.dtype, scale=2.0 / fresh.shape[-1] ** 0.5)
