"""Several rows in one forward: keys and values in `KVRows`, recurrent states in an ArraysCache of several rows."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias, TypeVar, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from runner.cache.layers import adapt, flatten
from runner.cache.layers.adapter import LayerState
from runner.cache.layers.rows import KVRows, Places
from runner.cache.layers.scans import RoundReads, States, watched
from runner.cache.layers.snapshot import Ledger

_PIECE_BYTES, _PIECES = 1 << 24, 32  # a batch grows in pieces of 16 MB, or of a 32nd of it if that is more


def staying(count: int, leaving: Collection[int]) -> list[int]:
    """Returns the rows that stay of `count`: the last rows take the places of leaving ones."""
    rows = [row for row in range(count) if row not in leaving]
    kept = len(rows)
    return [row if row not in leaving else rows.pop() for row in range(kept)]


BatchCache: TypeAlias = KVRows | ArraysCache
"""A cache of several rows."""
AnyCache = TypeVar("AnyCache")


def batchable(states: Sequence[LayerState]) -> bool:
    """Returns True if mlx-lm has a batch cache for each of these layers."""
    return bool(states) and all(state.batchable for state in states)


def unbatchable_layers(layers: list[object]) -> str:
    """Returns why answers with these fresh layers cannot share a forward; empty if they can."""
    unknown = {type(layer).__name__ for layer in flatten(layers) if not batchable([adapt(layer, Ledger())])}
    return f"mlx-lm has no batch of {', '.join(sorted(unknown))}" if unknown else ""


HeldStates = Sequence[tuple[ArraysCache, States]]
"""Layers with the states that they held."""


class BatchedLayers:
    """The layers of several rows that decode in one forward: copies of the rows' own layers, which stay as they are.

    Every change is evaluated at once, a few layers after the other, so that it needs room for the batch, for a 32nd of
    it or 16 MB, and for copies of the rows that join. A change that raised leaves the batch unusable. Owner: the engine
    thread.
    """

    layers: list[object]
    """The `cache=` argument of the model's forward, with tokens [B, L]."""

    def __init__(self, rows: Sequence[list[object]], spare: int = 0) -> None:
        """`rows` are batchable cache lists of one model, which have seen at least one token each. `go_back` may take
        them back by `spare` tokens. Raises ValueError if a layer cache occurs twice in a list, or if only some rows
        have a state."""
        self.layers = [_joined(same) for same in zip(*rows, strict=True)]
        self._count = len(rows)
        caches: list[object] = [*flatten(self.layers)]
        if any(len([*flatten(row)]) != len(caches) for row in rows):
            raise ValueError("a layer cache occurs twice in a list")
        self.caches = cast("list[BatchCache]", caches)
        """One for each layer that `flatten` finds in a row, in the same order."""
        self._stateful = [cache for cache in caches if isinstance(cache, ArraysCache)]
        used = [cache for cache in caches if isinstance(cache, KVRows) and cache.keys is not None]
        self._growing = sorted(used, key=lambda cache: cache.window is None)
        """Keys and values in the order in which they grow: the largest last."""
        places = Places()
        for cache in self._growing:
            cache.spare, cache.places = spare, places
        self._marks: list[tuple[KVRows, Sequence[int]]] = []
        self._reads: list[tuple[ArraysCache, RoundReads]] = []
        for piece in self._pieces():
            mx.eval(*map(arrays_of, piece))

    def __len__(self) -> int:
        return self._count

    def extend(self, rows: Sequence[list[object]]) -> None:
        """Appends further rows. Raises as the constructor does."""
        others = BatchedLayers(rows)
        coming = iter(others.caches)
        for piece in self._pieces():
            for mine in piece:
                _check_alike([mine, theirs := next(coming)])
                mine.extend(theirs)  # type: ignore[arg-type]  # they are of one class
            mx.eval(*map(arrays_of, piece))
        self._count += len(others)

    def make_room(self, rows: int, tokens: int) -> bool:
        """Makes a piece of the room for `rows` rows, of at most `tokens` tokens, and for the next tokens of all.
        Returns True once nothing is lacking."""
        if not self._growing or self._growing[-1].has_room(rows, tokens):
            return True  # all before the last have room, too
        lacking = [cache for cache in self._growing if not cache.has_room(rows, tokens)]
        piece = next(_pieces(lacking, self.nbytes))
        for cache in piece:
            cache.make_room(rows, tokens)
        mx.eval(*map(arrays_of, piece))
        return self._growing[-1].has_room(rows, tokens)

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, in this order; the order of `staying` is the cheapest. Raises ValueError if there are
        none, or if one is absent or occurs twice."""
        if not rows or sorted(rows) != sorted(set(rows) & set(range(self._count))):
            raise ValueError(f"cannot keep the rows {list(rows)} of {self._count}")
        for piece in self._pieces():
            moving = [cache.moving(rows) if isinstance(cache, KVRows) else list[mx.array]() for cache in piece]
            mx.eval(moving)
            for cache, copies in zip(piece, moving, strict=True):
                if isinstance(cache, KVRows):
                    cache.filter(rows, copies)
                else:
                    cache.filter([*rows])
            mx.eval(*map(arrays_of, piece))
        self._count = len(rows)

    def wipe_rows(self, rows: Sequence[int]) -> None:
        """Puts zeros in place of rows with NaN that are about to leave: others will take their places, and attention
        multiplies hidden columns by 0, which leaves NaN as it is."""
        for row in rows:
            for cache in self._growing:
                cache.wipe_row(row)

    def wipe_columns(self, count: int) -> None:
        """Puts zeros in place of the last round, over `count` tokens, after the ends of the rows."""
        for cache in self._growing:
            cache.wipe_columns(count)

    @contextmanager
    def draft_round(self, count: int) -> Iterator[None]:
        """Surrounds the call of the model over `count` tokens of each row, at least 2; `accept` has to follow."""
        self._marks = [(cache, cache.lengths) for cache in self._growing]
        self._reads = [(cache, RoundReads(partial(getattr, cache, "cache"), count)) for cache in self._stateful]
        with watched([reads for _, reads in self._reads]):
            yield

    @property
    def may_accept(self) -> bool:
        """True if each row can stand after any token of the round whose forward was built; otherwise after none."""
        return all(reads.known for _, reads in self._reads)

    def accept(self, counts: Sequence[int]) -> None:
        """Ends a round: each row stands after its first `counts` tokens. Raises ValueError if it cannot."""
        for cache, before in self._marks:
            cache.stand([length + count for length, count in zip(before, counts, strict=True)])
        for arrays, reads in self._reads:
            arrays.state = reads.states_after(counts), None, None
        self._marks, self._reads = [], []

    def states(self) -> HeldStates:
        """Returns the states before forwards over one token of each row, at most `spare`, for `go_back`."""
        return [(cache, [*cache.cache]) for cache in self._stateful]

    def go_back(self, states: HeldStates, lengths: Sequence[int]) -> None:
        """Brings these states back, and lets rows stand after `lengths` tokens: as many as they had with the states, or
        more if there are no states."""
        for arrays, held in states:
            arrays.state = held, None, None
        for cache in self._growing:
            cache.stand(lengths)

    def _pieces(self) -> Iterator[Sequence[BatchCache]]:
        return _pieces(self.caches, self.nbytes)

    def arrays(self) -> list[mx.array]:
        """Returns the states. Evaluate them beside the logits of a forward, which depend on all its other changes."""
        return [array for cache in self._stateful for array in arrays_of(cache)]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, including padding and room for tokens to come."""
        return sum(array.nbytes for cache in self.caches for array in arrays_of(cache))

    @property
    def nbytes_by_kind(self) -> tuple[int, int]:
        """The bytes of keys and values, which grow with the tokens, and of states, which do not."""
        kept = sum(cache.nbytes for cache in self._growing)
        return kept, self.nbytes - kept


def _joined(same: Sequence[object]) -> object:
    """Returns the batch cache of one layer of all rows (lazy)."""
    first = same[0]
    if first is None:
        return None
    if type(first) is CacheList:
        children = zip(*(cast("CacheList", each).caches for each in same), strict=True)
        return CacheList(*(_joined(child) for child in children))
    if type(first) is ArraysCache:
        return _stacked(cast("Sequence[ArraysCache]", same))
    return KVRows.of(cast("Sequence[KVCache]", same))


def _stacked(caches: Sequence[ArraysCache]) -> ArraysCache:
    """Joins states in place of `ArraysCache.merge`, which takes a layer without its first state for an empty one,
    raises if no row has a state, and gives zeros to a row that lacks one, which a model may take for something else."""
    _check_alike(caches)
    states = list(zip(*(cache.cache for cache in caches), strict=True))
    batch = ArraysCache(len(states))
    for index, same in enumerate(states):
        batch[index] = None if same[0] is None else mx.concatenate(list(same))
    return batch


def _check_alike(caches: Sequence[BatchCache]) -> None:
    """Raises ValueError if an ArraysCache lacks a state of another."""
    held = {tuple(state is None for state in vars(cache).get("cache", ())) for cache in caches}
    if len(held) > 1:
        raise ValueError("a row lacks a state that another one has")


def _pieces(caches: Sequence[AnyCache], batch_bytes: int) -> Iterator[Sequence[AnyCache]]:
    """Yields the caches of a batch in groups to change and evaluate together: an evaluation takes a while, whatever its
    size, and a group needs room for itself."""
    piece, held = list[AnyCache](), 0
    for cache in caches:
        piece.append(cache)
        held += sum(array.nbytes for array in arrays_of(cache))
        if held >= max(_PIECE_BYTES, batch_bytes // _PIECES):
            yield piece
            piece, held = [], 0
    if piece:
        yield piece


def arrays_of(cache: object) -> list[mx.array]:
    """Returns the arrays that a layer cache holds."""
    values = [value if isinstance(value, list) else (value,) for value in vars(cache).values()]
    return [x for value in values for x in value if isinstance(x, mx.array)]
