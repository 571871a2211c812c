"""A model of mlx-vlm in the form of mlx-lm's.

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
from runner.vlm import LIBRARY, NOT_INSTALLED

Weights = dict[str, mx.array]
Deepstack = Literal["rows", "tokens", "prompt"]
"""The form of additions in some layers: rows of pictures alone for each layer, [rows, width]; all tokens of a forward,
[B, L, layers, width]; or the prompt up to the end of a forward, [layers, offset + L, width]."""
_PARTS = ("text", "vision", "perceiver", "projector", "audio")
"""The parts of a config: for mlx-vlm the field `PART_config` of the class `PartConfig`."""
_PICTURE_TOKENS = ("image_token_index", "image_token_id", "media_placeholder_token_id", "image_token")
_OWN_CACHES = ("zaya1_vl",)
_CHANNELS_LAST = ("ernie4_5_moe_vl",)
_FLAT = ("minimax_m3", "minimax_m3_vl")
_DEEPSTACKS: Mapping[str, Deepstack] = {"qwen3_omni_moe": "tokens", "granite4_vision": "prompt"}
_ONE_TOKEN = ("fastvlm", "llava_bunny")
_UNUSED = ("vision_tower", "act_head", "temperature")
"""Parts of deciding models that no score needs."""
_SANITIZERS = (("VisionModel", "vision_config"), ("LanguageModel", "text_config"), ("AudioModel", "audio_config"))
"""Classes of a package whose `sanitize` also sees all weights, and their parts of the config."""


def make_module(package: str, config: Config) -> "Served":
    """Returns a fresh module of `mlx_vlm.models.PACKAGE` with random, lazy parameters. Raises ModelError if mlx-vlm
    cannot build it from this `config.json`."""
    name = f"{LIBRARY}.models.{package}"
    classes = import_package(package)
    try:
        module = cast("Served", _served(classes, package)(_args(classes, copy.deepcopy(config))))
    except Exception as error:  # classes of many authors raise anything
        raise ModelError(f"config.json does not fit {name}: {type(error).__name__}: {error}") from error
    module.hooks = Hooks()
    if package in DECIDERS.values():
        for part in _UNUSED:
            module.pop(part, None)
    return module


def import_package(package: str) -> ModuleType:
    """Returns `mlx_vlm.models.PACKAGE`. Skips mlx-vlm's own `__init__`, which imports servers and trainers. Raises
    ModelError if it is missing or cannot be imported."""
    if LIBRARY not in sys.modules:
        spec = importlib.util.find_spec(LIBRARY)
        if spec is None:
            raise ModelError(NOT_INSTALLED)
        sys.modules[LIBRARY] = importlib.util.module_from_spec(spec)
    logging.disable(logging.WARNING)  # transformers warns about a missing torch
    try:
        return importlib.import_module(f"{LIBRARY}.models.{package}")
    except ImportError as error:
        raise ModelError(f"mlx-vlm's module cannot be imported: {error}") from error
    finally:
        logging.disable(logging.NOTSET)


def bits(array: mx.array) -> mx.array:
    """Returns the bits of numbers in bfloat16 as integers."""
    return array.view(mx.uint16)


def _args(classes: ModuleType, config: dict[str, Any]) -> object:
    """Returns the config of a package, made as mlx-vlm makes it."""
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
    """The class of a package's model with mlx-lm's interface: tokens and layer caches to logits.

    It keeps nothing of a request. mlx-vlm's classes would keep positions, so each forward brings its own.
    """

    classes: ModuleType
    config: Any
    flat: bool
    """Positions have one channel."""
    channels_last: bool
    """Positions are [B, L, 3]."""
    deepstack: Deepstack
    one_token: bool
    """Its processor has one token for a picture, from which it makes a constant number of embeddings."""
    keeps_caches: bool
    """It needs caches of its own, and the places of pictures, at which it computes otherwise."""
    hooks: "Hooks"
    """The changes for the time of a forward over pictures."""

    def __call__(self, tokens: mx.array, cache: Sequence[object] | None = None, **parts: object) -> mx.array:
        """Returns the logits [B, L, V] of tokens [B, L] after the contents of the layer caches. `parts` are the
        additions of pictures by their names in mlx-vlm: `inputs_embeds` [1, L, width], `position_ids` and others."""
        text = self.text_model
        parts |= self.hooks.parts
        if self.takes_positions:
            positions = cast("mx.array | None", parts.get("position_ids"))
            if positions is None:
                offset = mx.array(next(offsets(cache or ()), 0)).reshape(-1, 1)
                positions = offset + mx.arange(tokens.shape[1])  # [B, L]
                positions = mx.broadcast_to(positions[None], (3, *positions.shape)) + self.hooks.shift
            if self.flat:
                positions = positions[0]
            parts["position_ids"] = positions.transpose(1, 2, 0) if self.channels_last else positions
        call = cast("Any", super()).__call__ if text is self else text
        return cast("mx.array", call(tokens, cache=cache, **parts).logits)

    @property
    def text_model(self) -> Any:
        """The part that takes tokens and embeddings."""
        return getattr(self, "language_model", getattr(self, "encoder", self))

    @property
    def layers(self) -> Sequence[object]:
        """The layers of the text model."""
        text = self.text_model
        return cast("Sequence[object]", cast("Any", super()).layers if text is self else text.layers)

    @property
    def picture_tokens(self) -> list[int]:
        """The ids that may stand for pictures."""
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
        """Gives every forward inside these parts."""
        self.hooks.parts = parts
        try:
            yield
        finally:
            self.hooks.parts = {}

    @contextmanager
    def shifted(self, shifts: Sequence[int]) -> Iterator[None]:
        """Shifts the positions of every forward inside: each row of a batch by its own number."""
        self.hooks.shift = mx.array([*shifts]).reshape(-1, 1) if any(shifts) else 0
        try:
            yield
        finally:
            self.hooks.shift = 0

    @property
    def takes_positions(self) -> bool:
        """True if the class would keep positions from one request to the next."""
        return hasattr(self.text_model, "_rope_deltas")

    def make_cache(self) -> list[object]:
        """Returns fresh layer caches: of mlx-lm's classes if it has them, else of mlx-vlm's own."""
        text = self.text_model
        if "encoder" in self:
            return []
        owner: Any = super() if text is self else text
        if hasattr(owner, "make_cache"):
            made = owner.make_cache()
            return list(made) if self.keeps_caches else [_mapped(each) for each in made]
        return [KVCache() for _ in text.layers]

    def sanitize(self, weights: Weights) -> Weights:
        """Returns the weights under the names of the parameters."""
        if hasattr(super(), "sanitize"):
            weights = cast("Any", super()).sanitize(weights)  # of the package's class
        for name, part in _SANITIZERS:
            kind: Any = getattr(self.classes, name, None)
            if hasattr(kind, "sanitize") and hasattr(self.config, part):
                weights = kind(getattr(self.config, part)).sanitize(weights)
        unused = tuple(f"{part}." for part in _UNUSED if part not in self)
        return {name: each for name, each in weights.items() if not f"{name}.".startswith(unused)}


@dataclass
class Hooks:
    """Additions to forwards, outside the parameters of modules."""

    parts: Mapping[str, object] = field(default_factory=dict)
    shift: int | mx.array = 0


@cache
def _served(classes: ModuleType, package: str) -> Callable[[object], Module]:
    members = {
        "__module__": f"{LIBRARY}.models.{package}",  # by which the tables of abilities know it
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
    """Returns a fresh cache of mlx-lm's class for a fresh one of mlx-vlm's; the same object if mlx-lm has none."""
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
    """Runs `update`, which mlx-vlm's classes expect of a recurrent cache, and keeps the last state alone."""
    del length
    output, state, *_ = update(cache[index], None)
    cache[index] = state
    return output, state


def _update_window(
    cache: ArraysCache, index: int, source: mx.array, width: int, *, lengths: mx.array | None = None
) -> mx.array:
    """Keeps the last `width` rows of `source` [B, L, D] before the padding, as mlx-vlm's classes expect."""
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
