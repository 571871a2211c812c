"""Keys and values of several rows that share a forward, in place of mlx-lm's batch caches.

After a round each row goes back by its own number of tokens, so rows need not end in the same column.
"""

from collections.abc import Sequence
from typing import NamedTuple
from weakref import ref

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from runner.cache.layers.snapshot import Buffers, own

SHORT_STEP, LONG_STEP = 64, 256
"""New buffers have room for `SHORT_STEP` more columns, as many answers are short. Each growth copies all rows. Buffers
that are nearly full grow by half of their columns, at least by `SHORT_STEP` and at most by `LONG_STEP`. Full buffers
grow by multiples of `LONG_STEP`."""
_AHEAD = 32  # the free columns with which buffers begin to grow, layer by layer
_MOST_PLACES = 4  # the most different windows that one model has


class Places:
    """The columns into which the rows of a forward write: the same in all layers with the same window."""

    def __init__(self) -> None:
        self._latest: dict[tuple[object, ...], mx.array] = {}

    def of(self, first: list[int], count: int, columns: int) -> mx.array:
        """Returns `count` columns for each row, from its `first` column on, modulo `columns`: int [B, 1, count, 1]."""
        key = (*first, count, columns)
        if key not in self._latest:
            if len(self._latest) > _MOST_PLACES:
                self._latest.clear()
            self._latest[key] = ((mx.array(first)[:, None] + mx.arange(count)) % columns)[:, None, :, None]
        return self._latest[key]


class Layout(NamedTuple):
    """The columns of entries in the buffers of a layer: the entry of token p of a row is in column (p + shift) modulo
    `columns`. A token sees at most `window` tokens; None means all."""

    lengths: tuple[int, ...]
    shifts: tuple[int, ...]
    columns: int
    window: int | None

    @property
    def full(self) -> bool:
        """True if the next token sees all columns."""
        return len(self.lengths) == 1 and self.window == self.columns <= self.lengths[0] + 1

    def numbers(self) -> list[list[int]]:
        """Returns four lists with a number for each row: lengths, columns of the next tokens, the first columns that
        these tokens see, and the numbers of columns that they see."""
        columns, firsts, seen = list[int](), list[int](), list[int]()
        for length, shift in zip(self.lengths, self.shifts, strict=True):
            seen.append(min(length + 1, self.window or length + 1))
            columns.append((length + shift) % self.columns)
            firsts.append((length + shift + 1 - seen[-1]) % self.columns)
        return [[*self.lengths], columns, firsts, seen]


class KVRows:
    """Keys and values of several rows: a layer cache for mlx-lm's models.

    The entry of token p of a row is in column (p + shift) of the buffers. At first all rows end in the same column, so
    that a forward over one token of each row writes one column. Once rows have gone back by different numbers of
    tokens, each row writes at its own end. New buffers are made when half of the columns in use lie before the first
    tokens of all rows.

    The buffers may have spare rows. If a row leaves, the last row moves to its place, and the next new row takes the
    last place: no other row moves. If buffers grow or shrink, each entry stays in its column, so that layers need not
    change at the same time, and one mask fits all layers.

    With a window, the buffers have room for the window and the tokens of a forward, and are written in turn: the column
    of token p is (p + shift) modulo the number of columns. Columns may hold stale entries: the mask shows a token only
    the columns of tokens that it may look at.

    Owner: the engine thread.
    """

    def __init__(
        self, window: int | None, parts: Sequence[Buffers], lengths: Sequence[int], sources: Sequence[object] = ()
    ) -> None:
        """`parts` are the last keys and values of each row, oldest first; empty if the model does not use the layer.
        `lengths` are the numbers of tokens that the rows have seen. `window` is in tokens; no part is longer. `sources`
        are the layers from which the parts are copied, if there are any."""
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.sources: Sequence[ref[object] | None] = [*map(ref, sources)] or [None] * len(lengths)
        """For each row, the layer from which it is copied."""
        self.lengths: list[int] = []
        """The number of tokens that each row has seen."""
        self._shifts: list[int] = []
        self.spare = 0
        """The number of tokens by which rows may go back, after forwards over one token each."""
        self.places = Places()
        """The object that all layers of a batch share."""
        self.window = window
        self._columns = 0
        self._lay(parts, lengths)

    @classmethod
    def of(cls, caches: Sequence[KVCache | RotatingKVCache]) -> "KVRows":
        """Returns one row for each of these caches, which must be of one class."""
        window = getattr(caches[0], "max_size", None)
        return cls(window, [_entries(each) for each in caches], [each.offset for each in caches], caches)

    def make_mask(
        self,
        N: int,  # noqa: N803  the name is mlx-lm's
        return_array: bool = False,  # noqa: ARG002
        window_size: int | None = None,
        *,
        causal: bool = True,
    ) -> mx.array:
        """Returns a mask of the columns that each of the next `N` tokens may look at, bool [B, 1, N, columns]. Unless
        `causal`, a token may also look at later tokens among these. The window also limits `window_size`."""
        self._make_room(N)
        windows = [size for size in (window_size, self.window) if size]
        return self._seen_from(mx.arange(N), N, min(windows, default=None), causal=causal)

    def _seen_from(self, ahead: mx.array, count: int, window: int | None, *, causal: bool = True) -> mx.array:
        """Returns a mask of the columns that tokens may look at once the rows have `count` more tokens: bool [B, 1, N,
        columns]. `ahead`, int [N], are the distances of these tokens from the end of each row."""
        lengths, shifts = (mx.array(each)[:, None] for each in (self.lengths, self._shifts))
        columns = mx.arange(self._shown(count))
        if self._end() + count <= self._columns:
            positions = columns - shifts
        else:
            last = lengths + (count - 1)
            positions = last - (last + shifts - columns) % self._columns
        tokens = (lengths + ahead)[:, None, :, None]
        positions = positions[:, None, None, :]
        last = tokens if causal else (lengths + (count - 1))[:, None, :, None]
        mask = (positions <= last) & (positions >= 0)
        return mask if window is None else mask & (positions > tokens - window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends entries [B, H, N, D] to the rows. Returns the keys and values in the columns of the mask."""
        count = keys.shape[2]
        self._make_room(count)
        if self.keys is None or self.values is None:
            shapes = ((*x.shape[:2], self._columns, x.shape[3]) for x in (keys, values))
            self.keys, self.values = (mx.zeros(shape, x.dtype) for shape, x in zip(shapes, (keys, values), strict=True))
        first = [(length + shift) % self._columns for length, shift in zip(self.lengths, self._shifts, strict=True)]
        start, shown = first[0], self._shown(count)
        rows = len(first)
        if first == [start] * rows and start + count <= self._columns:
            self.keys[:rows, :, start : start + count] = keys
            self.values[:rows, :, start : start + count] = values
        else:
            if free := self.keys.shape[0] - rows:
                first += [0] * free
                keys, values = (mx.pad(x, [(0, free), (0, 0), (0, 0), (0, 0)]) for x in (keys, values))
            places = self.places.of(first, count, self._columns)
            self.keys = mx.put_along_axis(self.keys, places, keys.astype(self.keys.dtype), axis=2)
            self.values = mx.put_along_axis(self.values, places, values.astype(self.values.dtype), axis=2)
        self.stand([length + count for length in self.lengths])
        return self.keys[:rows, :, :shown], self.values[:rows, :, :shown]

    def layout(self) -> Layout:
        """Makes room for a token of each row. Returns the layout of the entries."""
        self._make_room(1)
        return Layout((*self.lengths,), (*self._shifts,), self._columns, self.window)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Returns the keys and values in the columns that the last forward has seen."""
        keys, values = (x[: len(self.lengths), :, : self._shown(0)] for x in self._buffers)
        return keys, values

    def visible(self) -> mx.array:
        """Returns a mask of the columns that the last token of each row may look at, bool [B, 1, 1, columns]."""
        return self._seen_from(mx.array([-1]), 0, self.window)

    def stand(self, lengths: Sequence[int]) -> None:
        """Lets each row stand after its number of tokens in `lengths`, at most as many as it has seen. With a window,
        rows can go back by the tokens of the last forward, or by `spare`."""
        self.lengths = [*lengths]
        self.offset = mx.array(self.lengths)

    @property
    def _buffers(self) -> Buffers:
        """The keys and the values; an empty list if the model does not use the layer."""
        return [x for x in (self.keys, self.values) if x is not None]

    @property
    def nbytes(self) -> int:
        """The bytes of the buffers."""
        return sum(x.nbytes for x in self._buffers)

    def latest(self, row: int, count: int) -> Buffers:
        """Returns the keys and values of the last `count` tokens of a row, oldest first (lazy). The result is empty if
        the model does not use the layer."""
        if not count:
            return []
        stop = (self.lengths[row] + self._shifts[row]) % self._columns or self._columns
        found = [x[row : row + 1, :, max(0, stop - count) : stop] for x in self._buffers]
        if count <= stop:
            return found
        older = [x[row : row + 1, :, stop - count :] for x in self._buffers]
        return [mx.concatenate([*pair], axis=2) for pair in zip(older, found, strict=True)]

    def extend(self, other: "KVRows") -> None:
        """Appends the rows of `other`."""
        self.sources = [*self.sources, *other.sources]
        parts, end, lengths = other._parts(range(len(other.lengths))), self._end(), [*self.lengths, *other.lengths]
        held = [part[0].shape[2] if part else 0 for part in parts]
        in_turn = end > self._columns
        if self.keys is None or (in_turn and max(held) > self._columns):
            self._lay([*self._parts(range(len(self.lengths))), *parts], lengths)
            return
        ends = [max(end, count) for count in held]
        self._grow(len(lengths), 0 if in_turn else max(ends))
        for row, (part, stop) in enumerate(zip(parts, ends, strict=True), len(self.lengths)):
            for buffer, entries in zip(self._buffers, part, strict=False):
                first = (stop - entries.shape[2]) % self._columns
                fits = min(entries.shape[2], self._columns - first)
                buffer[row : row + 1, :, first : first + fits] = entries[:, :, :fits]
                if rest := entries.shape[2] - fits:
                    buffer[row : row + 1, :, :rest] = entries[:, :, fits:]
        self._shifts += [stop - length for stop, length in zip(ends, other.lengths, strict=True)]
        self.stand(lengths)

    def has_room(self, rows: int, tokens: int) -> bool:
        """Returns True if there is room for `rows` rows of at most `tokens` tokens, and for the next tokens of each."""
        has_columns = self.window is not None or max(tokens, self._end() + _AHEAD) <= self._columns
        return has_columns and rows <= self._buffers[0].shape[0]

    def make_room(self, rows: int, tokens: int) -> None:
        """Makes room, so that `has_room` returns True."""
        more = max(SHORT_STEP, min(LONG_STEP, self._columns // 2))
        columns = 0 if self.has_room(0, tokens) else max(tokens + SHORT_STEP, self._columns + more)
        self._grow(rows, columns)

    def _grow(self, rows: int, columns: int) -> None:
        """Gives the buffers at least `rows` rows and `columns` columns."""
        now = self._buffers[0].shape
        rows, columns = max(rows, now[0]), max(columns, self._columns)
        if (rows, columns) != (now[0], self._columns):
            more = [(0, rows - now[0]), (0, 0), (0, columns - now[2]), (0, 0)]
            self.keys, self.values = (mx.pad(x, more) for x in self._buffers)
        self._columns = columns

    def moving(self, rows: Sequence[int]) -> list[mx.array]:
        """Returns copies (lazy) of the rows that `filter(rows)` moves. Evaluate the copies before `filter`: until then
        they hold the buffers, and MLX would copy these whole."""
        return [own(buffer[old]) for new, old in enumerate(rows) if old != new for buffer in self._buffers]

    def filter(self, rows: Sequence[int], moving: Sequence[mx.array] = ()) -> None:
        """Keeps only these rows, in this order. `moving` is the result of the method `moving`. The buffers do not
        shrink while more than half of them is in use."""
        lengths, shifts = [self.lengths[row] for row in rows], [self._shifts[row] for row in rows]
        self.sources = [self.sources[row] for row in rows]
        end = max(map(sum, zip(lengths, shifts, strict=True)))
        if 2 * min(shifts) >= end:
            self._lay(self._parts(rows), lengths)
            return
        if not moving:
            mx.eval(moving := self.moving(rows))
        copies = iter(moving)
        buffers = self._buffers
        for new, old in enumerate(rows):
            for buffer in buffers if old != new else ():
                buffer[new] = next(copies)
        self._shifts = shifts
        self.stand(lengths)
        columns = self._columns if self.window is not None else min(self._columns, end + SHORT_STEP)
        if buffers and 2 * len(lengths) * columns <= buffers[0].shape[0] * self._columns:
            self.keys, self.values = (own(x[: len(lengths), :, :columns]) for x in buffers)
            self._columns = columns

    def wipe_row(self, row: int) -> None:
        """Replaces all entries of a row by zeros."""
        for buffer in self._buffers:
            buffer[row] = 0

    def wipe_columns(self, count: int) -> None:
        """Writes zeros over the last `count` tokens that each row has given up by going back."""
        lengths = self.lengths
        keys, values = (mx.zeros((len(lengths), x.shape[1], count, x.shape[3]), x.dtype) for x in self._buffers)
        self.update_and_fetch(keys, values)
        self.stand(lengths)

    def keep_last(self, counts: Sequence[int]) -> None:
        """Keeps only the last entries of each row, as if there had been no earlier entries. `counts` has their number
        for each row. Not for a window."""
        self._lay([self.latest(row, count) for row, count in enumerate(counts)], counts)

    def _parts(self, rows: Sequence[int]) -> list[Buffers]:
        most = max(self.lengths) if self.window is None else self.window + self.spare
        return [self.latest(row, min(self.lengths[row], most)) for row in rows]

    def _end(self) -> int:
        """Returns the column after the last entry of all rows, not modulo the number of columns."""
        return max(length + shift for length, shift in zip(self.lengths, self._shifts, strict=True))

    def _shown(self, count: int) -> int:
        """Returns the number of columns that attention reads in a forward over `count` tokens."""
        return min(self._columns, self._end() + count)

    def _make_room(self, count: int) -> None:
        """Makes room for `count` more tokens of each row."""
        most, wanted = self._most_columns(count), self._end() + count
        if wanted <= self._columns or (most is not None and most <= self._columns):
            return
        if self.keys is None or most is not None:
            self._lay(self._parts(range(len(self.lengths))), self.lengths, count, LONG_STEP)
        else:
            self._grow(0, self._columns - (self._columns - wanted) // LONG_STEP * LONG_STEP)

    def _most_columns(self, count: int) -> int | None:
        """Returns the number of columns that a window needs in a forward over `count` tokens; None without a window. It
        is one more than a token may look at: so every mask shows a row's oldest entry, where kernels begin to add."""
        return None if self.window is None else self.window + max(self.spare, count)

    def _lay(self, parts: Sequence[Buffers], lengths: Sequence[int], count: int = 1, step: int = SHORT_STEP) -> None:
        """Makes new buffers of `parts`, with room for `count` more tokens of each row, in multiples of `step`."""
        held = [part[0].shape[2] if part else 0 for part in parts]
        end, most = max(held), self._most_columns(count)
        room = -(-count // step) * step
        self._columns = end + room if most is None else max(end, min(end + room, most))
        self._shifts = [end - length for length in lengths]
        self.stand(lengths)
        like = next((part for part in parts if part), None)
        if like is None:
            self.keys = self.values = None
            return
        buffers = [mx.zeros((len(parts), x.shape[1], self._columns, x.shape[3]), x.dtype) for x in like]
        for row, (part, count) in enumerate(zip(parts, held, strict=True)):
            for buffer, entries in zip(buffers, part, strict=False):
                buffer[row : row + 1, :, end - count : end] = entries
        self.keys, self.values = buffers


def _entries(cache: KVCache | RotatingKVCache) -> Buffers:
    """Returns the keys and values in a layer cache of one row, oldest first."""
    if cache.keys is None or cache.values is None:
        return []
    if isinstance(cache, KVCache):
        return [x[..., : cache.offset, :] for x in (cache.keys, cache.values)]
    return [cache._temporal_order(x)[..., -cache.size() :, :] for x in (cache.keys, cache.values)]
