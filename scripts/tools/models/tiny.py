"""Tiny models with random weights, one for every kind of layer cache.

The weights are scaled so that what a layer remembers decides the next token: `test_models` shows that another first
token changes the logits by far more than the tolerances of these tests.
"""

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from mlx.utils import tree_map_with_path

from runner.cache.sketch import LayerFacts, Sketch
from runner.kv_bits.hadamard import HadamardKVCache
from runner.model.forwards import replace_forwards
from scripts.tools.models import data

from mlx_lm.models import (  # isort: skip
    deepseek_v3,
    deepseek_v32,
    deepseek_v41,
    falcon_h1,
    gemma3_text,
    gemma4_text,
    llama,
    llama4,
    mamba2,
    qwen3_next,
)
from mlx_lm.models.cache import make_prompt_cache  # isort: skip

VOCAB = 64
WINDOW = 32  # gemma3: RotatingKVCache of this size in two of three layers; gemma4: in one of two
GROUP = 32  # quantized: head width, and entries that share a scale
CHUNK = 16  # llama4: ChunkedKVCache of this size in three of four layers


class Forward(Protocol):
    """Token ids [1, L] and a cache list to logits [1, L, VOCAB]."""

    layers: Sequence[object]

    def __call__(self, inputs: mx.array, cache: list[object]) -> mx.array: ...


class Tiny(NamedTuple):
    """A model, what makes its cache list, and what its layers can do."""

    name: str
    model: Forward
    make_layers: Callable[[], list[object]]
    tolerance: float  # of logits against a prefill with other boundaries, which is the noise of the model itself

    @property
    def facts(self) -> LayerFacts:
        """The contents of its layers."""
        return Sketch(self.make_layers, self.logits, VOCAB).facts

    def logits(self, tokens: mx.array, layers: list[object]) -> mx.array:
        """Returns the logits [B, L, VOCAB] of tokens [B, L] on top of what the layers hold."""
        return self.model(tokens, cache=layers)


_TABLES = data.read("tiny")
LATENT: dict[str, Any] = _TABLES["latent"]
"""A model of multi-head latent attention."""
_NOISE = 2e-4  # of float32 with other boundaries; a token too many or too few is worth more than 1
_KINDS: dict[str, tuple[ModuleType, float]] = {
    "llama": (llama, _NOISE),  # KVCache
    "gemma3": (gemma3_text, _NOISE),  # KVCache and RotatingKVCache
    "mamba2": (mamba2, _NOISE),  # ArraysCache only: no layer has a clock
    "qwen3_next": (qwen3_next, _NOISE),  # KVCache and ArraysCache
    "falcon_h1": (falcon_h1, _NOISE),  # CacheList(ArraysCache, KVCache)
    "deepseek_v3": (deepseek_v3, _NOISE),  # KVCache of one head, keys and values of different widths
    "deepseek_v32": (deepseek_v32, _NOISE),  # CacheList(KVCache, KVCache), one of them of an indexer
    "quantized": (llama, 5e-2),  # HadamardKVCache: noise tips roundings to 8 bits, 0.02 without a cache
    "llama4": (llama4, _NOISE),  # ChunkedKVCache and KVCache
    "deepseek_v41": (deepseek_v41, 3.5e-2),  # a class of its own; noise tips roundings to 8 and 4 bits
}
"""mlx-lm's module, and the tolerance; `tiny.toml` has the arguments."""

KINDS = tuple(_KINDS)
_OTHERS = {"gemma4": (gemma4_text, _NOISE)}  # caches as gemma3's; layers that have none of their own


def words(count: int, seed: int = 1) -> list[int]:
    """Some tokens, the same every time; another first one for every seed."""
    return [(seed * 31 + i * i * 7 + i * 13) % VOCAB for i in range(count)]


@cache
def tiny(kind: str) -> Tiny:
    """The model of a kind out of KINDS, or gemma4, the same weights every time."""
    mx.disable_compile()
    replace_forwards()
    module, tolerance = {**_KINDS, **_OTHERS}[kind]
    mx.random.seed(7)
    model = module.Model(module.ModelArgs(**_TABLES[kind]))
    if kind == "quantized":
        model.make_cache = lambda: [HadamardKVCache(GROUP, bits=8) for _ in model.layers]
    model.update(tree_map_with_path(spread, model.parameters()))
    model.eval()
    mx.eval(model.parameters())

    def make_layers() -> list[object]:
        return list(make_prompt_cache(model))

    return Tiny(kind, model, make_layers, tolerance)


def spread(path: str, fresh: mx.array) -> mx.array:
    """Returns random numbers in place of a fresh weight, so that what a layer remembers counts."""
    if path.endswith("A_log"):
        return mx.full(fresh.shape, -4.0, mx.float32)  # a long memory
    if "norm" in path or fresh.ndim < 2:
        return fresh
    if "embed" in path:
        return mx.random.normal(fresh.shape)
    return mx.random.normal(fresh.shape, scale=2.0 / fresh.shape[-1] ** 0.5)
