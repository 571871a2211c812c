"""Positions in two directions: rotary angles, and rows of learned tables, for the patches of one picture."""

import mlx.core as mx

from runner.model.towers.tower import Grid


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
