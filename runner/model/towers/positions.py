"""Positions of patches: learned tables that are stretched over a grid, and rotation by rows and columns."""

from collections.abc import Callable

import mlx.core as mx

from runner.model.towers.block import Turn


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
