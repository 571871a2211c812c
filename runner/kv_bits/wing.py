"""Finds the layers of a model that accept quantized keys and values, by a trial, and quantizes these layers.

A quantized layer returns three arrays (packed, scales, biases) in place of one. Only attention by
`mlx_lm.models.base.scaled_dot_product_attention` accepts them. Other code raises while the graph is built, before
anything is computed: multi-head latent attention multiplies the cached rope keys itself (deepseek_v2, v3, v32,
kimi_linear, longcat_flash, ...), an indexer looks at the shape of its keys (minimax_m3_vl), attention sinks are refused
(gpt_oss), the model itself computes soft-capped scores (gemma2), and layers that read another layer's keys look at
their own cache for the format (afm7, gemma4). Widths that no group size divides (head_dim 80) cannot be quantized.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from runner.cache.layer_interface import MakeLayers
from runner.cache.layers import flatten
from runner.engine.generation import Forward
from runner.engine.parts import Parts, Wing
from runner.kv_bits.hadamard import HadamardKVCache, Packed
from runner.logs import Log
from runner.model.trials import difference, first_line

log = Log(__name__)

Groups = dict[int, int]
"""The group size of every quantized KVCache, by its index among the KVCaches of a cache list."""

_GROUP_SIZES = (64, 32)  # MLX has a larger size, too, which would save almost nothing
_TOKENS = 8
_TRIAL_BITS = 8
_LIMIT = 0.5
"""The largest accepted difference between the logits of a trial at 8 bits and the unquantized logits, in relation to
their spread. Measured: 0.005 to 0.07, and up to 0.3 with weights that amplify every rounding. Wrong attention, without
its mask or with mixed heads, makes a difference of 1 to 1.8. Correct attention at 4 bits can differ as much (a model
that recalled 16 of 16 facts recalled 9 at a difference of 1.05). So the difference at fewer bits is only logged."""


class KvBitsWing(Wing):
    """The wing for quantized keys and values, for models that make text."""

    name = "kv_bits"

    def plug(self, parts: Parts) -> None:
        bits, model = parts.settings.kv_bits, parts.model
        if bits is not None and not model.family.is_encoder:
            parts.make_layers, parts.salt = find_format(parts.make_layers, parts.logits, model.vocab_size, bits)


class Format(NamedTuple):
    """A function that makes the layers of a model, and the salt for their format: empty if no layer is quantized."""

    make_layers: MakeLayers
    name: str


def find_format(make_layers: MakeLayers, forward: Forward, vocab_size: int, bits: int) -> Format:
    """Quantizes the layers of a model that accept it. Logs their number, and why the other layers stay unquantized.

    `forward` maps token ids [1, L] and a cache list to logits [1, L, V]; `bits` is a key of BITS. Raises the errors of
    the model over plain layers. Owner: the engine thread; call it once, after loading.

    Computes a forward over 8 tokens and one over a single token: with plain layers, with layers of 8 bits and, if
    `bits` is less, with layers of `bits` bits. For each layer that raises, builds one more pair without computing it.
    """
    trial = _Trial(make_layers, forward, vocab_size)
    off = trial.search(bits)
    groups, kept = trial.groups, trial.kept
    del trial
    mx.clear_cache()  # frees the memory of the trial
    said = ", ".join(f"{count} {reason}" for reason, count in kept.items())
    if not groups:
        log.warning("keys and values stay unquantized", bits=bits, layers=said)
        return Format(make_layers, "")
    say = log.info if off <= _LIMIT else log.warning
    say(
        "keys and values are quantized",
        bits=bits,
        layers=len(groups),
        of=len(groups) + kept.total(),
        unquantized=said or "none",
        difference=round(off, 4),
    )
    return Format(lambda: quantized(make_layers(), groups, bits), f"kv{bits}")


def quantized(layers: list[object], groups: Groups, bits: int) -> list[object]:
    """Returns `layers`, a fresh list, with quantized layers for the KVCaches in `groups`, also in CacheLists."""
    return _replaced(layers, lambda place: HadamardKVCache(groups[place], bits) if place in groups else None)


def _replaced(layers: list[object], make: Callable[[int], object | None]) -> list[object]:
    """Returns the layers with each KVCache replaced by `make(index)`. A KVCache stays if that is None."""
    caches = _caches(layers)
    new = {id(cache): replacement for place, cache in enumerate(caches) if (replacement := make(place)) is not None}
    return [_put(layer, new) for layer in layers]


def _put(layer: object, new: dict[int, object]) -> object:
    # No closure: a recursive closure would keep the layers, later gigabytes, alive until a garbage collection.
    if type(layer) is CacheList:
        layer.caches = tuple(_put(child, new) for child in layer.caches)
    return new.get(id(layer), layer)


def _caches(layers: list[object]) -> list[KVCache]:
    """Returns the KVCaches among the layers, without subclasses, which may behave in another way."""
    return [cache for cache in flatten(layers) if type(cache) is KVCache]


class _Watched(HadamardKVCache):
    """Adds its place to `used` in a forward. If the forward raises, the last place is that of the layer that raised."""

    def __init__(self, group_size: int, place: int, used: list[int]) -> None:
        super().__init__(group_size, _TRIAL_BITS)
        self._place = place
        self._used = used

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        self._used.append(self._place)
        return super().update_and_fetch(keys, values)


class _Trial:
    """Computes the logits of some tokens with plain layers, and compares them with the logits of quantized layers."""

    groups: Groups
    kept: Counter[str]
    """The numbers of layers that stay unquantized, by kind and reason."""

    def __init__(self, make_layers: MakeLayers, forward: Forward, vocab_size: int) -> None:
        self._make_layers = make_layers
        self._forward = forward
        # Tokens from the whole vocabulary: the first ids are often special tokens.
        self._prompt = [(2 * i + 1) * vocab_size // (2 * _TOKENS) for i in range(_TOKENS)]
        layers = make_layers()
        self._plain = self._logits(layers)
        mx.eval(self._plain)
        self.kept = Counter(type(cache).__name__ for cache in flatten(layers) if type(cache) is not KVCache)
        self.groups = {}
        for place, cache in enumerate(_caches(layers)):
            widths = [x.shape[-1] for x in (cache.keys, cache.values) if x is not None]
            size = next((size for size in _GROUP_SIZES if not any(width % size for width in widths)), None)
            if widths and size:
                self.groups[place] = size
            else:
                self.kept[f"KVCache: {_why_not(widths)}"] += 1

    def search(self, bits: int) -> float:
        """Removes the layers that cannot be quantized from `groups`. Returns the difference that the other layers,
        quantized to `bits`, make to the logits."""
        self._drop_raising()
        # The code is the same for all bits. Only at 8 bits, wrong logits can be told from rounded logits.
        off = self._try(_TRIAL_BITS)
        if not off <= _LIMIT:  # also if it is NaN
            self._drop(list(self.groups), f"the logits of a trial are off by {off:.2f}")
        return off if bits == _TRIAL_BITS else self._try(bits)

    def _try(self, bits: int) -> float:
        if not self.groups:
            return 0.0
        try:
            return difference(self._logits(quantized(self._make_layers(), self.groups, bits)), self._plain)
        except Exception as error:  # in the evaluation: CUDA has no kernel for most shapes of these products
            self._drop(list(self.groups), first_line(error))
            return 0.0

    def _drop_raising(self) -> None:
        while self.groups:
            used: list[int] = []
            try:
                self._logits(_replaced(self._make_layers(), partial(self._watched, used)))
            except Exception as error:  # models raise all sorts of errors for unexpected arguments
                self._drop(used[-1:] or list(self.groups), first_line(error))
            else:
                return

    def _watched(self, used: list[int], place: int) -> HadamardKVCache | None:
        return _Watched(self.groups[place], place, used) if place in self.groups else None

    def _drop(self, places: list[int], reason: str) -> None:
        for place in places:
            del self.groups[place]
        self.kept[f"KVCache: {reason}"] += len(places)

    def _logits(self, layers: list[object]) -> mx.array:
        """Returns logits [8 + 1, V] for a prompt and one more token, not evaluated."""
        parts = [self._forward(mx.array([ids]), layers)[0] for ids in (self._prompt, self._prompt[:1])]
        return mx.concatenate(parts).astype(mx.float32)


def _why_not(widths: list[int]) -> str:
    if not widths:
        return "not used"
    return f"keys and values {' and '.join(map(str, widths))} wide are not multiples of {min(_GROUP_SIZES)}"
