"""The adapters for mlx-lm's layer caches, and the table that finds them. Nothing else knows these classes.

The table goes by the exact class: a subclass may behave in its own way, and then only the generic adapter is right.
"""

from collections.abc import Callable, Iterable, Iterator

import runner.process.lean_mlx_lm  # noqa: F401  registers mlx_lm without its package __init__

from mlx_lm.models.cache import (  # isort: skip
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from runner.cache.layer_interface import LayerState
from runner.cache.layers.adapter import LayerAdapter
from runner.cache.layers.chunk import ChunkState
from runner.cache.layers.generic import GenericState
from runner.cache.layers.kv import ExactKVState, KVState, PlainKVState
from runner.cache.layers.recurrent import RecurrentState
from runner.cache.layers.snapshot import Ledger
from runner.cache.layers.window import WindowState


def _window(leaf: RotatingKVCache, ledger: Ledger) -> LayerState:
    """No model asks for a window that keeps its first tokens for good; what it holds cannot be told by positions."""
    return GenericState(leaf, ledger) if leaf.keep else WindowState(leaf, ledger)


_ADAPTERS: dict[type, Callable[..., LayerState]] = {
    KVCache: PlainKVState,
    QuantizedKVCache: KVState,
    ConcatenateKVCache: ExactKVState,
    RotatingKVCache: _window,
    ChunkedKVCache: ChunkState,
    ArraysCache: RecurrentState,
}


def flatten(layers: Iterable[object]) -> Iterator[object]:
    """The leaves of a model's cache list in order: lists of caches opened, holes (None) left out, every object once."""
    seen: set[int] = set()
    for layer in layers:
        for leaf in _leaves(layer):
            if id(leaf) not in seen:
                seen.add(id(leaf))
                yield leaf


def adapt(leaf: object, ledger: Ledger, trusted: bool = True) -> LayerState:
    """The adapter for a fresh leaf, whose snapshots `ledger` counts. A leaf that speaks the interface is its own.

    Without trust it is the generic adapter, whatever the class.
    """
    if isinstance(leaf, LayerState):
        return leaf
    if not trusted:
        return GenericState(leaf, ledger)
    return _ADAPTERS.get(type(leaf), GenericState)(leaf, ledger)


def distrust(state: LayerState, offset: int) -> LayerState:
    """The generic adapter in place of one that misjudged its leaf, which has seen `offset` tokens."""
    if not isinstance(state, LayerAdapter):
        return state
    return GenericState.taking_over(state.leaf, state.ledger, state.fresh, offset)


def _leaves(layer: object) -> Iterator[object]:
    if type(layer) is CacheList:
        for child in layer.caches:
            yield from _leaves(child)
    elif layer is not None:
        yield layer
