"""The keys and values of a target that its assistant looks at: those of its last layer of each kind that has any."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

import runner.process.lean_mlx_lm  # noqa: F401  # registers mlx_lm without its __init__

# isort: split
from mlx_lm.models import gemma4, gemma4_text
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from runner.errors import ModelError


class Place(NamedTuple):
    """Where the keys and values of one kind of layer are, and what they are like."""

    layer: int
    """Among the caches of the target."""
    heads: int
    width: int
    """Of a head."""


class Shared(NamedTuple):
    """Keys and values [1, heads, tokens, width] that the attention of Gemma 4's layers takes in place of its own.

    Their order does not matter: the keys have been turned to their places, and all of them are visible.
    """

    keys: mx.array | None
    values: mx.array | None
    cache: object = None
    """What the attention asks for packed ones; None if they are plain."""


class _Packed:
    """Packed keys and values, for an attention that believes it writes into their cache."""

    def __init__(self, cache: QuantizedKVCache) -> None:
        self.bits, self.group_size = cache.bits, cache.group_size
        self._held = cache.keys_and_values()

    def update_and_fetch(self, keys: None, values: None) -> object:  # noqa: ARG002
        return self._held


def places_of(target: Module) -> dict[str, Place]:
    """Returns the places by kind of layer. Raises ModelError if the target, placeholders or not, is no Gemma 4."""
    text = target.language_model if isinstance(target, gemma4.Model) else target
    if not isinstance(text, gemma4_text.Model):
        raise ModelError(f"it drafts for Gemma 4, not for {type(target).__module__.rpartition('.')[2]}")
    own = text.args.num_hidden_layers - text.args.num_kv_shared_layers
    attentions = [layer.self_attn for layer in text.model.layers[:own]]
    return {
        attention.layer_type: Place(index, attention.n_kv_heads, attention.head_dim)
        for index, attention in enumerate(attentions)
    }


def read(
    places: Mapping[str, Place], kinds: Iterable[str], layers: Sequence[object], position: int
) -> dict[str, Shared] | None:
    """Returns the keys and values of these kinds, which nothing may outlive a forward of the target: MLX would have to
    copy them. None unless the target's `layers` have seen `position` tokens, at least one. Raises TypeError for caches
    that Gemma 4 does not have."""
    found = {kind: layers[places[kind].layer] for kind in kinds}
    if position < 1 or any(getattr(cache, "offset", None) != position for cache in found.values()):
        return None
    return {kind: _shared(cache) for kind, cache in found.items()}


def _shared(cache: object) -> Shared:
    if type(cache) is QuantizedKVCache:
        return Shared(None, None, _Packed(cache))
    if type(cache) not in (KVCache, RotatingKVCache):
        raise TypeError(f"an assistant cannot read a {type(cache).__name__}")
    kept = cast("KVCache | RotatingKVCache", cache)
    start, stop = _window(kept) if isinstance(kept, RotatingKVCache) else (0, kept.offset)
    return Shared(*(cast("mx.array", x)[..., start:stop, :] for x in (kept.keys, kept.values)))


def _window(ring: RotatingKVCache) -> tuple[int, int]:
    """Returns where the last `max_size` tokens begin and end in the buffers. A full ring is all of them, wherever it
    begins. Before that, the buffers have room at their end; behind a forward of several tokens, older ones at their
    beginning."""
    length = cast("mx.array", ring.keys).shape[-2]
    if length == ring.max_size < ring.offset:
        return 0, length
    return max(0, ring._idx - ring.max_size), ring._idx
