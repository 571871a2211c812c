"""A transformer block that towers share: attention over all patches, then a feed-forward network, both behind norms."""

from collections.abc import Callable
from functools import partial

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from runner.model.towers.tower import Layer, Steps, attend, in_pieces

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
