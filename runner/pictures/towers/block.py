"""A transformer block that towers share: attention over all patches, then a feed-forward network, both behind norms."""

from collections.abc import Callable
from functools import partial

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from runner.pictures.towers.tower import Grid, Layer, Steps, attend, in_pieces

NORM_EPS = 1e-6
_COPIES = 7
"""Arrays [count, width] in memory when queries, keys and values are joined: the input, the pieces, the result."""
_TEMPORARIES = 8
"""Arrays as large as a piece that computing one takes, whatever the layer."""
_SCORES = 2
"""Arrays as large as the scores of a block of queries that attention takes."""

Activation = Callable[[mx.array], mx.array]
Turn = Callable[[mx.array, slice], mx.array]
"""Rotates queries or keys [count, heads, head width] of the patches in the slice by their positions."""


class _Attention(Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = Linear(width, 3 * width)
        self.proj = Linear(width, width)


class _FeedForward(Layer):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = Linear(width, hidden)
        self.fc2 = Linear(hidden, width)


class Block(Layer):
    """One block over rows [count, width]; `hidden` is the width inside its feed-forward network."""

    def __init__(self, width: int, heads: int, hidden: int, activation: Activation) -> None:
        super().__init__()
        self.norm1 = LayerNorm(width, eps=NORM_EPS)
        self.attn = _Attention(width)
        self.norm2 = LayerNorm(width, eps=NORM_EPS)
        self.mlp = _FeedForward(width, hidden)
        self.heads = heads
        self.activation = activation

    @property
    def hidden(self) -> int:
        """The width inside the feed-forward network."""
        return self.mlp.fc1.bias.size

    def widen(self, hidden: int) -> None:
        """Changes that width, before there are weights."""
        self.mlp = _FeedForward(self.norm1.weight.size, hidden)

    def steps(self, x: mx.array, piece_bytes: int, turn: Turn | None = None) -> Steps:
        """Maps rows [count, width] to rows of the same shape."""
        count, width = x.shape
        projected = partial(self._projected, x, turn)
        joined = yield from in_pieces(projected, count, 3 * width * x.itemsize, piece_bytes, axis=2)
        queries, keys, values = (joined[index : index + 1] for index in range(3))
        attended = yield from attend(queries, keys, values, (width // self.heads) ** -0.5, piece_bytes)
        del joined, queries, keys, values  # else they would stay in memory until the block ends

        y = yield from in_pieces(partial(self._added, x, attended), count, width * x.itemsize, piece_bytes)
        del attended

        return (yield from in_pieces(partial(self._fed, y), count, self.hidden * x.itemsize, piece_bytes))

    def _projected(self, x: mx.array, turn: Turn | None, rows: slice) -> mx.array:
        """Returns queries, keys and values [3, heads, rows, head width]."""
        parts = self.attn.qkv(self.norm1(x[rows])).reshape(-1, 3, self.heads, x.shape[1] // self.heads)
        queries, keys, values = (parts[:, index] for index in range(3))
        if turn is not None:
            queries, keys = turn(queries, rows), turn(keys, rows)
        return mx.stack([queries, keys, values]).swapaxes(1, 2)

    def _added(self, x: mx.array, attended: mx.array, rows: slice) -> mx.array:
        """Returns `x` plus what the patches attended to, [1, heads, count, head width]."""
        return x[rows] + self.attn.proj(attended[0, :, rows].swapaxes(0, 1).reshape(-1, x.shape[1]))

    def _fed(self, x: mx.array, rows: slice) -> mx.array:
        return x[rows] + self.mlp.fc2(self.activation(self.mlp.fc1(self.norm2(x[rows]))))

    def peak_bytes(self, count: int, itemsize: int, piece_bytes: int) -> int:
        """Returns an estimate of the most bytes that the steps over `count` rows take at a moment, input included."""
        width = self.norm1.weight.size
        row_bytes = max(3 * width, self.hidden) * itemsize
        piece = max(min(piece_bytes, count * row_bytes), row_bytes)
        scores = max(min(piece_bytes, count * count * self.heads * 4), count * self.heads * 4)
        return _COPIES * count * width * itemsize + max(_TEMPORARIES * piece, _SCORES * scores)


# --- Positions of patches: learned tables that are stretched over a grid, and rotation by rows and columns.


def interpolated(look_up: Callable[[mx.array], mx.array], side: int, rows: mx.array, columns: mx.array) -> mx.array:
    """Returns the bilinear mix of a table's entries at float coordinates [count], in float32 [count, width].

    `look_up` returns the entries [count, width] of indices into side * side of them. Beyond the edge the table goes on
    with its outermost entries.
    """

    def corners(at: mx.array) -> tuple[tuple[mx.array, mx.array], ...]:
        low = mx.floor(at)
        share = (at - low)[:, None]
        ends = (mx.clip(end, 0, side - 1).astype(mx.int32) for end in (low, low + 1))
        return tuple(zip(ends, (1 - share, share), strict=True))

    parts = [
        look_up(row * side + column).astype(mx.float32) * (row_share * column_share)
        for row, row_share in corners(rows)
        for column, column_share in corners(columns)
    ]
    return parts[0] + parts[1] + parts[2] + parts[3]


def turn_by(rows: mx.array, columns: mx.array, head_width: int, theta: float) -> Turn:
    """Returns the rotation by the places [count] of patches: half of the frequencies by the row, half by the column.

    Numbers i and i + head_width / 2 of a head are a pair. Computed in float32.
    """
    steps = mx.arange(0, head_width // 2, 2, dtype=mx.float32) / (head_width // 2)
    frequencies = 1.0 / theta**steps
    places = (rows, columns)
    angles = mx.concatenate([each.astype(mx.float32)[:, None] * frequencies for each in places], -1)[:, None]
    cosines, sines = mx.cos(angles), mx.sin(angles)

    def turn(x: mx.array, which: slice) -> mx.array:
        first, second = mx.split(x.astype(mx.float32), 2, axis=-1)
        cosine, sine = cosines[which], sines[which]
        turned = mx.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
        return turned.astype(x.dtype)

    return turn


# --- Positions in two directions: rotary angles, and rows of learned tables, for the patches of one picture.


def rotary_angles(grid: Grid, width: int, theta: float) -> mx.array:
    """Returns float32 angles [patches, 2, width / 2], in row-major order: of the column, then of the row.

    `width` is the part of a head that turns with one direction. Attention sees only how far patches are apart, so it
    does not matter that the reference for Glimmer counts from 1.
    """
    frequencies = mx.array([theta ** (-2 * index / width) for index in range(width // 2)])
    columns = mx.arange(grid.columns, dtype=mx.float32)[:, None] * frequencies
    rows = mx.arange(grid.rows, dtype=mx.float32)[:, None] * frequencies
    shape = (grid.rows, grid.columns, width // 2)
    pair = [mx.broadcast_to(columns[None], shape), mx.broadcast_to(rows[:, None], shape)]
    return mx.stack(pair, axis=2).reshape(grid.patches, 2, width // 2)


def turned(x: mx.array, angles: mx.array, axis: int) -> mx.array:
    """Turns pairs of `x` by `angles`, in float32; returns the type of `x`.

    `axis` has the two of a pair, so it is of length 2 in `x`; `angles` broadcasts to `x` without it.
    """
    first, second = (part.squeeze(axis).astype(mx.float32) for part in mx.split(x, 2, axis=axis))
    cos, sin = mx.cos(angles), mx.sin(angles)
    return mx.stack([first * cos - second * sin, second * cos + first * sin], axis=axis).astype(x.dtype)


def summed_rows(columns: mx.array, rows: mx.array, grid: Grid) -> mx.array:
    """Returns [patches, width]: for each patch its row of the table for columns plus that of the table for rows.

    The tables are [positions, width]. Raises ValueError where one has too few positions.
    """
    if len(columns) < grid.columns or len(rows) < grid.rows:
        raise ValueError(f"{len(columns)} x {len(rows)} positions are too few for {grid}")
    return (columns[: grid.columns][None] + rows[: grid.rows][:, None]).flatten(0, 1)


def _taps(count: int, side: int) -> tuple[mx.array, mx.array]:
    """Returns two entries of `side` around each of `count` points over the same length, with their weights: [2, count].

    An entry outside of the table has no weight.
    """
    points = (mx.arange(count, dtype=mx.float32) + 0.5) * (side / count) - 0.5
    low = mx.floor(points)
    places = mx.stack([low, low + 1])
    weights = mx.stack([1 - (points - low), points - low])
    inside = (places >= 0) & (places < side)
    return mx.clip(places, 0, side - 1).astype(mx.int32), mx.where(inside, weights, 0)


def resampled(table: mx.array, sides: Grid, grid: Grid) -> mx.array:
    """Returns float32 [patches, width]: the table [sides.patches, width], stretched over the grid.

    Bilinear between the centres of cells, with zeros around the table. Rows of the grid are rows of the table, also
    where it is not square: Meta's first code and Ollama's runner mix the directions up (pytorch/torchtitan#4244).
    """
    rows, row_weights = _taps(grid.rows, sides.rows)
    columns, column_weights = _taps(grid.columns, sides.columns)
    result = mx.zeros((grid.patches, table.shape[-1]))
    for row in range(2):
        for column in range(2):
            places = rows[row][:, None] * sides.columns + columns[column]
            weights = row_weights[row][:, None] * column_weights[column]
            result = result + table[places.flatten()] * weights.flatten()[:, None]
    return result


# --- Estimates of what encoding takes, measured with MLX's CPU backend; a GPU's kernels keep no attention scores.

_LAYER_COPIES = 13
"""Arrays [patches, row] at a time: the input, its norm, queries, keys and values in pieces and joined, the result."""
_LAYER_SCORES = 3
"""Arrays of scores for one block of queries at a time."""
_INNER = 5
"""Arrays of one piece inside the feed-forward network at a time."""


def work_bytes(dtype: mx.Dtype) -> int:
    """Returns the bytes of a number of that type while it is computed with; MLX's CPU backend widens 16-bit ones."""
    return 4 if mx.default_device() == mx.Device(mx.cpu) else dtype.size


def transformer_bytes(count: int, row_bytes: int, inner_bytes: int, heads: int, piece_bytes: int) -> int:
    """Returns the most bytes that the blocks of an encoder take for `count` patches.

    `row_bytes` are those of one patch's queries, `inner_bytes` those of its row inside the feed-forward network.
    """
    scores = min(max(piece_bytes, heads * count * 4), heads * count * count * 4)
    inner = min(max(piece_bytes, inner_bytes), count * inner_bytes)
    return _LAYER_COPIES * count * row_bytes + max(_LAYER_SCORES * scores, _INNER * inner)


def embedding_bytes(count: int, values: int, row_bytes: int) -> int:
    """Returns the most bytes that embedding `count` patches of `values` pixels takes: float32 copies, then rows."""
    return count * (values * (1 + 5 * 4) + 6 * row_bytes)
