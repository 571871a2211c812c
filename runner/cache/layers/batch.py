"""Several rows in one forward: mlx-lm's batch caches (BatchKVCache, BatchRotatingKVCache, ArraysCache of several rows).

Their buffers hold the rows one below the other, aligned at their ends. A row shorter than the longest begins with
padding, which the masks of these classes hide.
"""

from collections.abc import Sequence
from typing import Protocol, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, BatchKVCache, CacheList

from runner.cache.layer_interface import LayerState
from runner.cache.layers import adapt, flatten
from runner.cache.layers.snapshot import Ledger, own


class BatchCache(Protocol):
    """The methods that mlx-lm's batch caches share, and `merge`, which makes one."""

    def merge(self, caches: "Sequence[BatchCache]") -> "BatchCache": ...

    def extend(self, other: "BatchCache") -> None: ...

    def filter(self, batch_indices: list[int]) -> None: ...


def batchable(states: Sequence[LayerState]) -> bool:
    """Returns True if mlx-lm has a batch cache for each of these layers."""
    return bool(states) and all(state.batchable for state in states)


def unbatchable_layers(layers: list[object]) -> str:
    """Returns why answers with these fresh layers cannot share a forward; empty if they can."""
    unknown = {type(layer).__name__ for layer in flatten(layers) if not batchable([adapt(layer, Ledger())])}
    return f"mlx-lm has no batch of {', '.join(sorted(unknown))}" if unknown else ""


class BatchedLayers:
    """The layers of several rows that decode in one forward: copies of the rows' own layers, which stay as they are.

    Every change is evaluated at once, layer by layer, so that it needs room for the batch, one more layer of it, and
    copies of the rows that join. A change that raised leaves the batch unusable. Owner: the engine thread.
    """

    layers: list[object]
    """The `cache=` argument of the model's forward, with tokens [B, 1]."""

    def __init__(self, rows: Sequence[list[object]]) -> None:
        """`rows` are batchable cache lists of one model, which have seen at least one token each.

        Raises ValueError if they cannot be joined: a layer cache occurs twice in a list, or only some rows have a
        state.
        """
        self.layers = _merged(rows)
        self._count = len(rows)

    def __len__(self) -> int:
        return self._count

    def extend(self, rows: Sequence[list[object]]) -> None:
        """Appends further rows. Raises as the constructor does."""
        others = BatchedLayers(rows)
        for mine, theirs in zip(self.batch_caches(), others.batch_caches(), strict=True):
            _check_alike([mine, theirs])
            mine.extend(theirs)
            mx.eval(_arrays(mine))
        self._count += len(others)

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows. Raises ValueError unless they are at least one, present, and ascending."""
        if not rows or list(rows) != sorted(set(rows) & set(range(self._count))):
            raise ValueError(f"cannot keep the rows {list(rows)} of {self._count}")
        for cache in self.batch_caches():
            before = vars(cache).get("_idx")
            cache.filter(list(rows))
            if isinstance(cache, BatchKVCache) and cache.keys is not None and cache._idx != before:
                # Needless padding was cut off, and would stay in memory until the next write.
                cache.keys = own(cache.keys)
                cache.values = own(cache.values)
            mx.eval(_arrays(cache))
        self._count = len(rows)

    def batch_caches(self) -> list[BatchCache]:
        """Returns one batch cache for each layer that `flatten` finds in a row, in the same order."""
        return cast("list[BatchCache]", list(flatten(self.layers)))

    def arrays(self) -> list[mx.array]:
        """Returns all arrays to evaluate after a forward. Positions and padding count on lazily, and would become an
        ever longer graph if no layer of the model used them."""
        return [array for cache in self.batch_caches() for array in _arrays(cache)]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, including padding and room for tokens to come."""
        return sum(array.nbytes for array in self.arrays())


def _merged(rows: Sequence[list[object]]) -> list[object]:
    layers = [_joined(same) for same in zip(*rows, strict=True)]
    if any(len(list(flatten(row))) != len(list(flatten(layers))) for row in rows):
        raise ValueError("a layer cache occurs twice in a list")
    return layers


def _joined(same: Sequence[object]) -> object:
    """Returns the evaluated batch cache of one layer of all rows."""
    first = same[0]
    if first is None:
        return None
    if type(first) is CacheList:
        children = zip(*(cast("CacheList", each).caches for each in same), strict=True)
        return CacheList(*(_joined(child) for child in children))
    caches = cast("Sequence[BatchCache]", same)
    batch = _stacked(caches) if type(first) is ArraysCache else caches[0].merge(caches)
    mx.eval(_arrays(batch))
    return batch


def _stacked(caches: Sequence[BatchCache]) -> BatchCache:
    """Joins states in place of `ArraysCache.merge`, which takes a layer without its first state for an empty one,
    raises if no row has a state, and gives zeros to a row that lacks one, which a model may take for something else."""
    _check_alike(caches)
    states = list(zip(*(cast("ArraysCache", cache).cache for cache in caches), strict=True))
    batch = ArraysCache(len(states))
    for index, same in enumerate(states):
        batch[index] = None if same[0] is None else mx.concatenate(list(same))
    return cast("BatchCache", batch)


def _check_alike(caches: Sequence[BatchCache]) -> None:
    """Raises ValueError if an ArraysCache has a state that another lacks."""
    held = {tuple(state is None for state in vars(cache).get("cache", ())) for cache in caches}
    if len(held) > 1:
        raise ValueError("a row lacks a state that another one has")


def _arrays(cache: BatchCache) -> list[mx.array]:
    values = [value if isinstance(value, list) else (value,) for value in vars(cache).values()]
    return [x for value in values for x in value if isinstance(x, mx.array)]
