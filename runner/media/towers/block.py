"""The layers of towers: attention over all patches, then a feed-forward network; and the positions of patches."""

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm

from runner.errors import ModelError
from runner.media.towers.tower import Steps, TowerLayer, attend_in_pieces, in_pieces

NORM_EPS = 1e-6
CORNERS = 4
"""The number of table entries that `interpolated` mixes for one patch."""
_COPIES, _TEMPORARIES, _SCORES = 7, 8, 3
"""The numbers of arrays that are in memory together: of [count, width], while queries, keys and values are joined; of
the size of a piece; and of the size of the scores of a block of queries."""

Activation = Callable[[mx.array], mx.array]
Turn = Callable[[mx.array, slice], mx.array]
"""Rotates the queries or keys [count, heads, head width] of a slice of the patches by the patches' positions."""


def head_width(width: int, heads: int, multiple: int = 1) -> int:
    """Returns the width of one head. Raises ModelError unless `width` is a multiple of `heads` x `multiple`."""
    if width % (heads * multiple):
        raise ModelError(
            f"config.json: a vision tower's width ({width}) must be divisible by its {heads} heads"
            + (f" times {multiple}" if multiple > 1 else "")
        )
    return width // heads


class TowerBlock(TowerLayer):
    """One layer over rows [count, width]. A subclass has the parameters, and maps each row by itself."""

    def __init__(
        self, width: int, hidden: int, heads: int, head: int, *, kv_heads: int = 0, scale: float | None = None
    ) -> None:
        """`hidden` is the width inside the feed-forward network, `head` the width of a head. `kv_heads` is the number
        of heads for keys and values; 0 means `heads`."""
        super().__init__()
        self.width, self.hidden = width, hidden
        self.heads, self.kv_heads, self.head = heads, kv_heads or heads, head
        self.scale = head**-0.5 if scale is None else scale

    def project(self, x: mx.array) -> Sequence[mx.array]:
        """Maps rows of the layer's input to queries, keys and values [count, heads, head width]."""
        raise NotImplementedError

    def output(self, attended: mx.array) -> mx.array:
        """Maps the results of attention [count, heads * head width] to the rows that are added to the input."""
        raise NotImplementedError

    def feed(self, x: mx.array) -> mx.array:
        """Maps rows to the rows that the feed-forward network adds."""
        raise NotImplementedError

    def steps(
        self, x: mx.array, piece_bytes: int, turn: Turn | None = None, segments: Sequence[slice] = (slice(None),)
    ) -> Steps:
        """Maps rows [count, width] to rows of the same shape. A patch sees the patches of the same
        segment; `segments` are consecutive slices."""
        count = len(x)
        joined_bytes = (self.heads + 2 * self.kv_heads) * self.head * 4  # rotation is in float32
        joined = yield from in_pieces(partial(self._projected, x, turn), count, joined_bytes, piece_bytes, axis=1)
        queries, keys, values = mx.split(joined[None], [self.heads, self.heads + self.kv_heads], axis=1)
        parts: list[mx.array] = []
        for rows in segments:
            if parts:
                yield parts[-1]
            seen = [each[:, :, rows] for each in (queries, keys, values)]
            parts.append((yield from attend_in_pieces(seen[0], seen[1], seen[2], self.scale, piece_bytes)))
        attended = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
        del joined, queries, keys, values, parts  # else all would stay in memory until the block ends

        y = yield from in_pieces(partial(self._added, x, attended), count, joined_bytes, piece_bytes)
        del attended

        return (yield from in_pieces(partial(self._fed, y), count, self.hidden * x.itemsize, piece_bytes))

    def _projected(self, x: mx.array, turn: Turn | None, rows: slice) -> mx.array:
        """Returns queries, keys and values [all heads, rows, head width]."""
        queries, keys, values = self.project(x[rows])
        if turn is not None:
            queries, keys = turn(queries, rows), turn(keys, rows)
        return mx.concatenate([queries, keys, values], axis=1).swapaxes(0, 1)

    def _added(self, x: mx.array, attended: mx.array, rows: slice) -> mx.array:
        """Returns `x` plus the output for the results of attention [1, heads, count, head width]."""
        return x[rows] + self.output(attended[0, :, rows].swapaxes(0, 1).flatten(1))

    def _fed(self, x: mx.array, rows: slice) -> mx.array:
        return x[rows] + self.feed(x[rows])

    def peak_bytes(self, count: int, itemsize: int, piece_bytes: int) -> int:
        """Returns an estimate of the most memory, in bytes, that `steps` over `count` rows needs at any moment, input
        included. The factors were measured with MLX's CPU backend."""
        width = max(self.width, self.heads * self.head)
        row_bytes = max(3 * width, self.hidden) * itemsize
        piece = max(min(piece_bytes, count * row_bytes), row_bytes)
        scores = max(min(piece_bytes, count * count * self.heads * 4), count * self.heads * 4)
        return _COPIES * count * width * itemsize + max(_TEMPORARIES * piece, _SCORES * scores)


class PlainFeedForward(TowerLayer):
    """The two linears of a feed-forward network."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = Linear(width, hidden)
        self.fc2 = Linear(hidden, width)


class _PlainAttention(TowerLayer):
    def __init__(self, width: int, joined: bool) -> None:
        super().__init__()
        if joined:
            self.qkv = Linear(width, 3 * width)
        else:
            self.q_proj, self.k_proj, self.v_proj = (Linear(width, width) for _ in range(3))
        self.proj = Linear(width, width)


class PlainBlock(TowerBlock):
    """A layer of attention and a feed-forward network, each after a norm."""

    def __init__(
        self, width: int, hidden: int, heads: int, activation: Activation, eps: float = NORM_EPS, *, joined: bool = True
    ) -> None:
        """With `joined`, one linear makes queries, keys and values together."""
        super().__init__(width, hidden, heads, width // heads)
        self.norm1 = LayerNorm(width, eps=eps)
        self.attn = _PlainAttention(width, joined)
        self.norm2 = LayerNorm(width, eps=eps)
        self.mlp = PlainFeedForward(width, hidden)
        self.activation = activation

    def widen(self, hidden: int) -> None:
        """Sets the width inside the feed-forward network. Called before weights are loaded."""
        self.hidden = hidden
        self.mlp = PlainFeedForward(self.width, hidden)

    def project(self, x: mx.array) -> Sequence[mx.array]:
        normed, attn = self.norm1(x), self.attn
        if "qkv" not in attn:
            linears = (attn.q_proj, attn.k_proj, attn.v_proj)
            return [linear(normed).reshape(-1, self.heads, self.head) for linear in linears]
        parts = attn.qkv(normed).reshape(-1, 3, self.heads, self.head)
        return [parts[:, index] for index in range(3)]

    def output(self, attended: mx.array) -> mx.array:
        return self.attn.proj(attended)

    def feed(self, x: mx.array) -> mx.array:
        return self.mlp.fc2(self.activation(self.mlp.fc1(self.norm2(x))))


def rotary_angles(places: Sequence[mx.array], width: int, theta: float) -> mx.array:
    """Returns float32 angles [count, directions, width / 2]. `places` are the places [count] in each direction.
    `width` is the width of the part of a head that one direction rotates."""
    frequencies = mx.array([theta ** (-2 * index / width) for index in range(width // 2)])
    return mx.stack([each.astype(mx.float32)[:, None] * frequencies for each in places], axis=1)


def turn_by(angles: mx.array, form: tuple[int, ...], axis: int) -> Turn:
    """Returns the rotation by `angles`, computed in float32. A head is reshaped to `form`, whose axis `axis` holds the
    two numbers of each rotary pair. `angles` are float32 [count, ...], with the shape `form` without that axis."""
    cosines, sines = mx.cos(angles)[:, None], mx.sin(angles)[:, None]

    def turn(x: mx.array, rows: slice) -> mx.array:
        parts = x.astype(mx.float32).reshape(*x.shape[:2], *form)
        first, second = (part.squeeze(axis + 2) for part in mx.split(parts, 2, axis=axis + 2))
        cosine, sine = cosines[rows], sines[rows]
        turned = [first * cosine - second * sine, second * cosine + first * sine]
        return mx.stack(turned, axis=axis + 2).reshape(x.shape).astype(x.dtype)

    return turn


def interpolated(
    look_up: Callable[[mx.array], mx.array],
    sides: tuple[int, int],
    rows: mx.array,
    columns: mx.array,
    *,
    zeros: bool = False,
) -> mx.array:
    """Returns float32 [count, width]: bilinear mixes of a table's entries at the float coordinates `rows`, `columns`.

    `look_up` returns the entries [count, width] for indices into a table of `sides` (rows, columns). Outside the table,
    entries equal the table's outermost entries, or with `zeros` are 0.
    """

    def ends(at: mx.array, side: int) -> list[tuple[mx.array, mx.array]]:
        low = mx.floor(at)
        share = at - low
        pairs = [(low, 1 - share), (low + 1, share)]
        if zeros:
            pairs = [(end, mx.where((end >= 0) & (end < side), weight, 0)) for end, weight in pairs]
        return [(mx.clip(end, 0, side - 1).astype(mx.int32), weight[:, None]) for end, weight in pairs]

    parts = [
        look_up(row * sides[1] + column).astype(mx.float32) * (row_weight * column_weight)
        for row, row_weight in ends(rows, sides[0])
        for column, column_weight in ends(columns, sides[1])
    ]
    return parts[0] + parts[1] + parts[2] + parts[3]
