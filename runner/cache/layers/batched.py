"""Layers for several rows in one forward: `KVRows` with keys and values, and ArraysCaches with recurrent states."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias, TypeVar, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from runner.cache.layers import adapt, flatten
from runner.cache.layers.adapter import LayerState
from runner.cache.layers.rows import KVRows, Places
from runner.cache.layers.scans import StateReads, States, watched
from runner.cache.layers.snapshot import Ledger

_PIECE_BYTES, _PIECES = 1 << 24, 32  # a batch grows in pieces of 16 MB, or of a 32nd of the batch if this is more


def staying(count: int, leaving: Collection[int]) -> list[int]:
    """Returns the rows that stay if the rows `leaving` leave `count` rows: the last rows take the places of these."""
    rows = [row for row in range(count) if row not in leaving]
    kept = len(rows)
    return [row if row not in leaving else rows.pop() for row in range(kept)]


BatchCache: TypeAlias = KVRows | ArraysCache
"""A cache of several rows."""
AnyCache = TypeVar("AnyCache")


def batchable(states: Sequence[LayerState]) -> bool:
    """Returns True if all these layers can be joined into a batch. Returns False for no layers."""
    return bool(states) and all(state.batchable for state in states)


def unbatchable_layers(layers: list[object]) -> str:
    """Returns the reason why answers with these fresh layers cannot share a forward, or an empty text if they can."""
    unknown = {type(layer).__name__ for layer in flatten(layers) if not batchable([adapt(layer, Ledger())])}
    return f"mlx-lm has no batch of {', '.join(sorted(unknown))}" if unknown else ""


HeldStates = Sequence[tuple[ArraysCache, States]]
"""Layers, each with its states before some forwards."""


class BatchedLayers:
    """The layers of several rows that decode in one forward. They are copies: the rows' own layers do not change.

    Every change is evaluated immediately, a few layers after the other. So it needs room for the batch, for a 32nd of
    the batch or 16 MB, and for copies of the rows that join. After a change has raised, the batch is unusable. Owner:
    the engine thread.
    """

    layers: list[object]
    """The `cache=` argument of the model's forward, with tokens [B, L]."""

    def __init__(self, rows: Sequence[list[object]], spare: int = 0) -> None:
        """`rows` are batchable cache lists of one model, each of at least one token. `go_back` can take rows back by
        `spare` tokens. Raises ValueError if a layer cache occurs twice in a list, or if only some rows have a state."""
        self.layers = [_joined(same) for same in zip(*rows, strict=True)]
        self._count = len(rows)
        caches: list[object] = [*flatten(self.layers)]
        if any(len([*flatten(row)]) != len(caches) for row in rows):
            raise ValueError("a layer cache occurs twice in a list")
        self.caches = cast("list[BatchCache]", caches)
        """The batch caches, one for each layer that `flatten` yields for a row, in the same order."""
        self._stateful = [cache for cache in caches if isinstance(cache, ArraysCache)]
        used = [cache for cache in caches if isinstance(cache, KVRows) and cache.keys is not None]
        self._growing = sorted(used, key=lambda cache: cache.window is None)
        """The caches with keys and values, in the order in which they grow: the largest last."""
        places = Places()
        for cache in self._growing:
            cache.spare, cache.places = spare, places
        self._marks: list[tuple[KVRows, Sequence[int]]] = []
        self._reads: list[tuple[ArraysCache, StateReads]] = []
        for piece in self._pieces():
            mx.eval(*map(arrays_of, piece))

    def __len__(self) -> int:
        return self._count

    def extend(self, rows: Sequence[list[object]]) -> None:
        """Appends further rows. Raises the errors of the constructor."""
        others = BatchedLayers(rows)
        coming = iter(others.caches)
        for piece in self._pieces():
            for mine in piece:
                _check_alike([mine, theirs := next(coming)])
                mine.extend(theirs)  # type: ignore[arg-type]  # both are of one class
            mx.eval(*map(arrays_of, piece))
        self._count += len(others)

    def make_room(self, rows: int, tokens: int) -> bool:
        """Makes a piece of the room for `rows` rows of at most `tokens` tokens, and for the next tokens of all rows.
        Returns True once there is room for everything."""
        if not self._growing or self._growing[-1].has_room(rows, tokens):
            return True  # caches before the last one have room, too
        lacking = [cache for cache in self._growing if not cache.has_room(rows, tokens)]
        piece = next(_pieces(lacking, self.nbytes))
        for cache in piece:
            cache.make_room(rows, tokens)
        mx.eval(*map(arrays_of, piece))
        return self._growing[-1].has_room(rows, tokens)

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, in this order. The order of `staying` copies least. Raises ValueError if `rows` is
        empty, or if a row does not exist or occurs twice."""
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
        """Replaces rows by zeros. Call it for rows with NaN before they leave: other rows will take their places, and
        attention multiplies hidden columns by 0, which leaves NaN as it is."""
        for row in rows:
            for cache in self._growing:
                cache.wipe_row(row)

    def wipe_columns(self, count: int) -> None:
        """Replaces the last round, over `count` tokens, by zeros. Call it after all rows have gone back."""
        for cache in self._growing:
            cache.wipe_columns(count)

    @contextmanager
    def draft_round(self, count: int) -> Iterator[None]:
        """Surrounds the call of the model over `count` tokens, at least 2, of each row. Call `accept` afterwards."""
        self._marks = [(cache, cache.lengths) for cache in self._growing]
        self._reads = [(cache, StateReads(partial(getattr, cache, "cache"), count)) for cache in self._stateful]
        with watched([reads for _, reads in self._reads]):
            yield

    @property
    def may_accept(self) -> bool:
        """True if each row can stand after any token of the last round; otherwise all rows must go back."""
        return all(reads.known for _, reads in self._reads)

    def accept(self, counts: Sequence[int]) -> None:
        """Ends a round: each row stands after its number of tokens in `counts`. Raises ValueError if a row cannot."""
        for cache, before in self._marks:
            cache.stand([length + count for length, count in zip(before, counts, strict=True)])
        for arrays, reads in self._reads:
            arrays.state = reads.states_after(counts), None, None
        self._marks, self._reads = [], []

    def states(self) -> HeldStates:
        """Returns the present states, for `go_back` after at most `spare` forwards over one token of each row."""
        return [(cache, [*cache.cache]) for cache in self._stateful]

    def go_back(self, states: HeldStates, lengths: Sequence[int]) -> None:
        """Restores these states, and lets each row stand after its number of tokens in `lengths`: the number that the
        row had with these states, or a larger one if the model has no states."""
        for arrays, held in states:
            arrays.state = held, None, None
        for cache in self._growing:
            cache.stand(lengths)

    def _pieces(self) -> Iterator[Sequence[BatchCache]]:
        return _pieces(self.caches, self.nbytes)

    def arrays(self) -> list[mx.array]:
        """Returns the arrays of the states. Evaluate them together with the logits of a forward, which depend on all
        other arrays that the forward changes."""
        return [array for cache in self._stateful for array in arrays_of(cache)]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, with padding and room for later tokens."""
        return sum(array.nbytes for cache in self.caches for array in arrays_of(cache))

    @property
    def nbytes_by_kind(self) -> tuple[int, int]:
        """The bytes of keys and values, which grow with the tokens, and the bytes of states, which do not grow."""
        kept = sum(cache.nbytes for cache in self._growing)
        return kept, self.nbytes - kept


def _joined(same: Sequence[object]) -> object:
    """Returns the batch cache for `same`, the same layer of every row (lazy)."""
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
    """Joins states. Replaces `ArraysCache.merge`, which treats a layer without its first state as empty, raises if no
    row has a state, and gives zeros to a row that lacks a state, which a model may misread."""
    _check_alike(caches)
    states = list(zip(*(cache.cache for cache in caches), strict=True))
    batch = ArraysCache(len(states))
    for index, same in enumerate(states):
        batch[index] = None if same[0] is None else mx.concatenate(list(same))
    return batch


def _check_alike(caches: Sequence[BatchCache]) -> None:
    """Raises ValueError if one ArraysCache lacks a state that another has."""
    held = {tuple(state is None for state in vars(cache).get("cache", ())) for cache in caches}
    if len(held) > 1:
        raise ValueError("a row lacks a state that another one has")


def _pieces(caches: Sequence[AnyCache], batch_bytes: int) -> Iterator[Sequence[AnyCache]]:
    """Yields the caches of a batch in groups. Change and evaluate each group together: every evaluation has an
    overhead, and the room that a change needs grows with the group."""
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
