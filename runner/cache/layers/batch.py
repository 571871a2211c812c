"""Several rows in one forward: mlx-lm's batch caches (BatchKVCache, BatchRotatingKVCache, ArraysCache of more rows).

Their buffers hold the rows one below the other, aligned at their ends: a row that is shorter than the longest begins
with padding, which the masks of these classes hide.
"""

from collections.abc import Sequence
from typing import Protocol, cast

import mlx.core as mx

import runner.process.lean_mlx_lm  # noqa: F401  registers mlx_lm without its package __init__

from mlx_lm.models.cache import ArraysCache, BatchKVCache, CacheList  # isort: skip

from runner.cache.layer_interface import LayerState
from runner.cache.layers import flatten
from runner.cache.layers.snapshot import own


class BatchCache(Protocol):
    """What the batch caches have in common, and their makers."""

    def merge(self, caches: "Sequence[BatchCache]") -> "BatchCache": ...

    def extend(self, other: "BatchCache") -> None: ...

    def filter(self, batch_indices: list[int]) -> None: ...


def batchable(states: Sequence[LayerState]) -> bool:
    """Whether mlx-lm has a batch cache for each of these layers."""
    return bool(states) and all(state.batchable for state in states)


class BatchedLayers:
    """BatchCache that decode in one forward, made of copies of the rows' layers: what happens here leaves those alone.

    Every change is evaluated at once, layer by layer, so that it needs room for the batch, one layer of it more, and
    copies of the rows that join. A change that raised leaves the batch good for nothing. Owner: the engine thread.
    """

    layers: list[object]
    """What the forward of the model takes as `cache=`, with tokens [B, 1]."""

    def __init__(self, rows: Sequence[list[object]]) -> None:
        """`rows`: cache lists of one model, batchable, each of which has seen at least one token.

        Raises ValueError where they do not go together: a layer cache that occurs twice in a list, or a state that only
        some of the rows have.
        """
        self.layers = _merged(rows)
        self._count = len(rows)

    def __len__(self) -> int:
        return self._count

    def extend(self, rows: Sequence[list[object]]) -> None:
        """Puts further rows behind those that are there. Raises as the constructor does."""
        others = BatchedLayers(rows)
        for mine, theirs in zip(self._leaves(), others._leaves(), strict=True):
            _check_alike([mine, theirs])
            mine.extend(theirs)
            mx.eval(_arrays(mine))
        self._count += len(others)

    def keep(self, rows: Sequence[int]) -> None:
        """Leaves only these rows, in this order. Raises ValueError unless they are in it, at least one, ascending."""
        if not rows or list(rows) != sorted(set(rows) & set(range(self._count))):
            raise ValueError(f"cannot keep the rows {list(rows)} of {self._count}")
        for leaf in self._leaves():
            before = vars(leaf).get("_idx")
            leaf.filter(list(rows))
            if isinstance(leaf, BatchKVCache) and leaf.keys is not None and leaf._idx != before:
                # Padding that none of them needs was cut off, and would stay in memory up to the next write.
                leaf.keys, leaf.values = own(leaf.keys), own(leaf.values)
            mx.eval(_arrays(leaf))
        self._count = len(rows)

    def leaves(self) -> list[object]:
        """One for each that `flatten` finds in a row, in the same order."""
        return list(flatten(self.layers))

    def arrays(self) -> list[mx.array]:
        """All that a forward leaves, to evaluate after it: positions and padding count on lazily, and would become an
        ever longer graph where no layer of the model asks for them."""
        return [array for leaf in self._leaves() for array in _arrays(leaf)]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, padding and room for tokens to come included."""
        return sum(array.nbytes for array in self.arrays())

    def _leaves(self) -> list[BatchCache]:
        return cast("list[BatchCache]", self.leaves())


def _merged(rows: Sequence[list[object]]) -> list[object]:
    layers = [_joined(same) for same in zip(*rows, strict=True)]
    if any(len(list(flatten(row))) != len(list(flatten(layers))) for row in rows):
        raise ValueError("a layer cache occurs twice in a list")
    return layers


def _joined(same: Sequence[object]) -> object:
    """The batch cache, evaluated, of one layer of all rows."""
    first = same[0]
    if first is None:
        return None
    if type(first) is CacheList:
        children = zip(*(cast("CacheList", each).caches for each in same), strict=True)
        return CacheList(*(_joined(child) for child in children))
    leaves = cast("Sequence[BatchCache]", same)
    batch = _stacked(leaves) if type(first) is ArraysCache else leaves[0].merge(leaves)
    mx.eval(_arrays(batch))
    return batch


def _stacked(leaves: Sequence[BatchCache]) -> BatchCache:
    """In place of `ArraysCache.merge`, which takes a layer without its first state for an empty one, raises where a
    state is nobody's, and gives zeros to a row that lacks one, which a model need not take for the same."""
    _check_alike(leaves)
    states = list(zip(*(cast("ArraysCache", leaf).cache for leaf in leaves), strict=True))
    batch = ArraysCache(len(states))
    for index, same in enumerate(states):
        batch[index] = None if same[0] is None else mx.concatenate(list(same))
    return cast("BatchCache", batch)


def _check_alike(leaves: Sequence[BatchCache]) -> None:
    """Raises ValueError where an ArraysCache has a state that another lacks."""
    held = {tuple(state is None for state in vars(leaf).get("cache", ())) for leaf in leaves}
    if len(held) > 1:
        raise ValueError("a row lacks a state that another one has")


def _arrays(leaf: BatchCache) -> list[mx.array]:
    values = [value if isinstance(value, list) else (value,) for value in vars(leaf).values()]
    return [x for value in values for x in value if isinstance(x, mx.array)]
