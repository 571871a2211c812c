"""Gives a model of mlx-vlm the interface of mlx-lm's models.

Owner: the engine thread, like every array.
"""

import copy
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any, Literal, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

import runner.process.lean_mlx_lm  # noqa: F401

from mlx_lm.models.cache import ArraysCache, CacheList, ConcatenateKVCache, KVCache, RotatingKVCache  # isort: skip

from runner.errors import ModelError
from runner.model.architectures import DECIDERS, Config
from runner.model.forwards import replace_forwards
from runner.vlm import LIBRARY, NOT_INSTALLED

Weights = dict[str, mx.array]
Deepstack = Literal["rows", "tokens", "prompt"]
"""The form of additions to some layers. `rows`: for each layer [rows, width], of pictures alone. `tokens`: [B, L,
layers, width], all tokens of a forward. `prompt`: [layers, offset + L, width], the prompt up to a forward's end."""
_PARTS = ("text", "vision", "perceiver", "projector", "audio")
"""The parts of a config. mlx-vlm reads the field `PART_config` into the class `PartConfig`."""
_PICTURE_TOKENS = ("image_token_index", "image_token_id", "media_placeholder_token_id", "image_token")
_OWN_CACHES = ("zaya1_vl",)
_CHANNELS_LAST = ("ernie4_5_moe_vl",)
_FLAT = ("minimax_m3", "minimax_m3_vl")
_DEEPSTACKS: Mapping[str, Deepstack] = {"qwen3_omni_moe": "tokens", "granite4_vision": "prompt"}
_ONE_TOKEN = ("fastvlm", "llava_bunny")
_UNUSED = ("vision_tower", "act_head", "temperature")
"""The modules of deciding models that no score needs."""
_SANITIZERS = (("VisionModel", "vision_config"), ("LanguageModel", "text_config"), ("AudioModel", "audio_config"))
"""(Class of a package, part of the config for it). The `sanitize` of each class also gets all weights."""


def make_module(package: str, config: Config) -> "Served":
    """Returns a fresh module of `mlx_vlm.models.PACKAGE` with random, lazy parameters. Raises ModelError if mlx-vlm
    cannot build the module from this `config.json`."""
    name = f"{LIBRARY}.models.{package}"
    classes = import_package(package)
    try:
        module = cast("Served", _served(classes, package)(_args(classes, copy.deepcopy(config))))
    except Exception as error:  # classes of many authors raise errors of any type
        raise ModelError(f"config.json does not fit {name}: {type(error).__name__}: {error}") from error
    module.hooks = Hooks()
    if package in DECIDERS.values():
        for part in _UNUSED:
            module.pop(part, None)
    return module


def import_package(package: str) -> ModuleType:
    """Returns `mlx_vlm.models.PACKAGE`. Skips mlx-vlm's own `__init__`, which imports servers and trainers. Raises
    ModelError if mlx-vlm is missing or the package cannot be imported."""
    if LIBRARY not in sys.modules:
        spec = importlib.util.find_spec(LIBRARY)
        if spec is None:
            raise ModelError(NOT_INSTALLED)
        sys.modules[LIBRARY] = importlib.util.module_from_spec(spec)
        # mlx-vlm would compute the experts of 2 to 8 tokens token by token
        setattr(importlib.import_module(f"{LIBRARY}.models.linear"), "DECODE_BLOCK_SIZE", 1)  # noqa: B010
    logging.disable(logging.WARNING)  # transformers warns about a missing torch
    try:
        classes = importlib.import_module(f"{LIBRARY}.models.{package}")
    except ImportError as error:
        raise ModelError(f"mlx-vlm's module cannot be imported: {error}") from error
    finally:
        logging.disable(logging.NOTSET)
    replace_forwards()
    return classes


def bits(array: mx.array) -> mx.array:
    """Returns the bits of bfloat16 numbers as uint16."""
    return array.view(mx.uint16)


def _args(classes: ModuleType, config: dict[str, Any]) -> object:
    """Returns the `ModelConfig` of a package, made of `config` in the way of mlx-vlm."""
    config.setdefault("text_config", config.pop("llm_config", {}))
    config.setdefault("vision_config", {})
    config.setdefault("audio_config", {})
    args = classes.ModelConfig.from_dict(config)
    for part in _PARTS:
        field = f"{part}_config"
        if hasattr(args, field) and config.get(field) is not None:
            setattr(args, field, getattr(classes, f"{part.title()}Config").from_dict(config[field]))
    return args


class Served(Module):
    """A model of a package with mlx-lm's interface: maps tokens and layer caches to logits.

    Keeps nothing of a request. mlx-vlm's classes would keep positions, so each forward passes its positions to them.
    """

    classes: ModuleType
    config: Any
    flat: bool
    """True if positions have one channel instead of three."""
    channels_last: bool
    """True if positions are [B, L, 3] instead of [3, B, L]."""
    deepstack: Deepstack
    one_token: bool
    """True if the processor has one token for a picture, of which the model makes a constant number of embeddings."""
    keeps_caches: bool
    """True if the model needs mlx-vlm's layer caches, and the places of pictures, where it computes differently."""
    hooks: "Hooks"
    """The additions to the forwards that run now."""

    def __call__(self, tokens: mx.array, cache: Sequence[object] | None = None, **parts: object) -> mx.array:
        """Returns the logits [B, L, V] of tokens [B, L] after the contents of the layer caches. `parts` are the
        additions of pictures by their names in mlx-vlm: `inputs_embeds` [1, L, width], `position_ids` and others."""
        text = self.text_model
        parts |= self.hooks.parts
        if self.takes_positions:
            positions = cast("mx.array | None", parts.get("position_ids"))
            if positions is None:
                positions = self.plain_positions(tokens.shape[1], cache or ()) + self.hooks.shift
            if self.flat:
                positions = positions[0]
            parts["position_ids"] = positions.transpose(1, 2, 0) if self.channels_last else positions
        call = cast("Any", super()).__call__ if text is self else text
        return cast("mx.array", call(tokens, cache=cache, **parts).logits)

    @staticmethod
    def plain_positions(count: int, layers: Iterable[object]) -> mx.array:
        """Returns the positions [3, B, count] of the tokens after the contents of the layer caches."""
        positions = mx.array(next(offsets(layers), 0)).reshape(-1, 1) + mx.arange(count)  # [B, count]
        return mx.broadcast_to(positions[None], (3, *positions.shape))

    @property
    def text_model(self) -> Any:
        """The text model: the part that maps tokens or embeddings to logits."""
        return getattr(self, "language_model", getattr(self, "encoder", self))

    @property
    def layers(self) -> Sequence[object]:
        """The layers of the text model."""
        text = self.text_model
        return cast("Sequence[object]", cast("Any", super()).layers if text is self else text.layers)

    @property
    def picture_tokens(self) -> list[int]:
        """The ids in the config that may stand for a picture in a prompt."""
        config = getattr(self.config, "thinker_config", self.config)
        found = (getattr(config, name, None) for name in _PICTURE_TOKENS)
        return [token for token in found if type(token) is int]

    def embeddings(self, tokens: mx.array) -> mx.array:
        """Returns the embeddings [1, L, width] of tokens [1, L]."""
        return cast("mx.array", cast("Any", self).get_input_embeddings(tokens, None).inputs_embeds)

    @property
    def width(self) -> int:
        """The width of embeddings."""
        return self.embeddings(mx.array([[0]])).shape[-1]

    @contextmanager
    def during(self, parts: Mapping[str, object]) -> Iterator[None]:
        """Passes `parts` to every forward in the `with` block."""
        self.hooks.parts = parts
        try:
            yield
        finally:
            self.hooks.parts = {}

    @contextmanager
    def shifted(self, shifts: Sequence[int]) -> Iterator[None]:
        """Shifts the positions of every forward in the `with` block: each row of a batch by its number in `shifts`."""
        self.hooks.shift = mx.array([*shifts]).reshape(-1, 1) if any(shifts) else 0
        try:
            yield
        finally:
            self.hooks.shift = 0

    @property
    def takes_positions(self) -> bool:
        """True if the class needs explicit positions, because it would keep those of the request before."""
        return hasattr(self.text_model, "_rope_deltas")

    def make_cache(self) -> list[object]:
        """Returns fresh layer caches: mlx-lm's, or mlx-vlm's own if mlx-lm lacks the class or with `keeps_caches`."""
        text = self.text_model
        if "encoder" in self:
            return []
        owner: Any = super() if text is self else text
        if hasattr(owner, "make_cache"):
            made = owner.make_cache()
            return list(made) if self.keeps_caches else [_mapped(each) for each in made]
        return [KVCache() for _ in text.layers]

    def sanitize(self, weights: Weights) -> Weights:
        """Returns the weights under the names of this module's parameters."""
        if hasattr(super(), "sanitize"):
            weights = cast("Any", super()).sanitize(weights)  # the method of the package's class
        for name, part in _SANITIZERS:
            kind: Any = getattr(self.classes, name, None)
            if hasattr(kind, "sanitize") and hasattr(self.config, part):
                weights = kind(getattr(self.config, part)).sanitize(weights)
        unused = tuple(f"{part}." for part in _UNUSED if part not in self)
        return {name: each for name, each in weights.items() if not f"{name}.".startswith(unused)}


@dataclass
class Hooks:
    """Additions to forwards, in an object of their own so that they are no parameters of the module."""

    parts: Mapping[str, object] = field(default_factory=dict)
    shift: int | mx.array = 0


@cache
def _served(classes: ModuleType, package: str) -> Callable[[object], Module]:
    members = {
        "__module__": f"{LIBRARY}.models.{package}",  # the tables of abilities know the class by this name
        "classes": classes,
        "flat": package in _FLAT,
        "channels_last": package in _CHANNELS_LAST,
        "deepstack": _DEEPSTACKS.get(package, "rows"),
        "one_token": package in _ONE_TOKEN,
        "keeps_caches": package in _OWN_CACHES,
    }
    return type("Model", (Served, classes.Model), members)


def offsets(layers: Iterable[object]) -> Iterator[int | mx.array]:
    for layer in layers:
        if isinstance(layer, CacheList):
            yield from offsets(layer.caches)
        elif hasattr(layer, "offset"):
            yield layer.offset


def _mapped(layer: object) -> object:
    """Returns mlx-lm's fresh cache for a fresh cache of mlx-vlm; `layer` itself if mlx-lm has no such class."""
    kind = type(layer).__name__ if type(layer).__module__ == f"{LIBRARY}.models.cache" else ""
    if kind == "KVCache":
        return KVCache()
    if kind == "ConcatenateKVCache":
        return ConcatenateKVCache()
    if kind == "RotatingKVCache":
        window = cast("RotatingKVCache", layer)
        return RotatingKVCache(max_size=window.max_size, keep=window.keep)
    if kind == "CacheList":
        return CacheList(*map(_mapped, cast("CacheList", layer).caches))
    if kind == "ArraysCache":
        return ArraysCache(len(cast("ArraysCache", layer).cache))
    return layer


def _update_recurrent(cache: ArraysCache, index: int, length: int, update: Callable[..., Sequence[Any]]) -> Any:
    """A method that mlx-vlm's classes call on a recurrent cache: runs `update` and keeps only the last state."""
    del length
    output, state, *_ = update(cache[index], None)
    cache[index] = state
    return output, state


def _update_window(
    cache: ArraysCache, index: int, source: mx.array, width: int, *, lengths: mx.array | None = None
) -> mx.array:
    """A method that mlx-vlm's classes call: keeps the last `width` rows of `source` [B, L, D] before its padding."""
    last = source.shape[1] - width
    if lengths is None:
        state = mx.contiguous(source[:, last:])
    else:
        at = mx.clip(lengths, 0, last)[:, None] + mx.arange(width)
        state = mx.take_along_axis(source, at.reshape(*at.shape, *[1] * (source.ndim - 2)), axis=1)
    cache[index] = state
    return state


_states: Any = ArraysCache
_states.update_recurrent, _states.update_window = _update_recurrent, _update_window
