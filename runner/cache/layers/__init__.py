"""The adapters for mlx-lm's layer caches, and the table that chooses an adapter by the class of a layer.

Owner: the engine thread. Read in this order: `adapter.py` (the base), `snapshot.py` (live and owned snapshots, the
ledger that counts them), then a file for each sort of layer: `kv.py` (sliceable), `window.py` (with a tail: windows and
Llama 4's chunks), `states.py` (with a state: recurrent layers, with `scans.py` for their rounds, and all other
classes). `batched.py` joins the layers of several sequences, whose keys and values are in `rows.py`. `compiled.py`
keeps the graph of a decode step over layers; `attention.py` is a kernel for such steps.

Always true: an adapter never copies bytes that can stay in place; a layer overwrites a live snapshot only after the
snapshot is paged out; an array that outlives a forward shares its buffer with no other array.

The table has exact classes: a subclass may behave in another way, so it gets the generic adapter. A class of the
runner's own, outside of this package, has an attribute `adapter` in place of an entry in the table.
"""

from collections.abc import Callable, Iterable, Iterator

import runner.process.lean_mlx_lm  # noqa: F401  registers mlx_lm without its package __init__

from mlx_lm.models.cache import (  # isort: skip
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
)

from runner.cache.layers.adapter import LayerState
from runner.cache.layers.kv import ExactKVState, PlainKVState
from runner.cache.layers.snapshot import Ledger
from runner.cache.layers.states import GenericState, RecurrentState
from runner.cache.layers.window import ChunkState, WindowState

_ADAPTERS: dict[type, Callable[..., LayerState]] = {
    KVCache: PlainKVState,
    ConcatenateKVCache: ExactKVState,
    # With `keep`, a window always holds its first tokens, so its content is no range of positions. No model uses it.
    RotatingKVCache: lambda layer, ledger: (GenericState if layer.keep else WindowState)(layer, ledger),
    ChunkedKVCache: ChunkState,
    ArraysCache: RecurrentState,
}


def flatten(layers: Iterable[object]) -> Iterator[object]:
    """Yields the layer caches of a model's cache list in order, each object once. Skips None, and yields the layers
    inside a CacheList in place of the CacheList."""
    seen: set[int] = set()
    waiting = [*layers][::-1]
    while waiting:
        layer = waiting.pop()
        if type(layer) is CacheList:
            waiting += layer.caches[::-1]
        elif layer is not None and id(layer) not in seen:
            seen.add(id(layer))
            yield layer


def adapt(layer: object, ledger: Ledger, trusted: bool = True) -> LayerState:
    """Returns the adapter for a fresh layer: the adapter of its class, or the generic adapter if the class has none or
    the layer is not trusted. `ledger` counts the layer's snapshots."""
    own = vars(type(layer)).get("adapter", GenericState)
    return (_ADAPTERS.get(type(layer), own) if trusted else GenericState)(layer, ledger)


def distrust(state: LayerState, offset: int) -> LayerState:
    """Returns the generic adapter for the layer of `state`, which counts something other than tokens. It has seen
    `offset` tokens."""
    generic = GenericState(state.layer, state.ledger)
    generic.fresh, generic.offset = state.fresh, offset
    return generic
