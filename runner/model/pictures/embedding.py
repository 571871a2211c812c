"""An embedding table in which some rows of a forward are replaced by features of pictures."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module


class Rows(NamedTuple):
    """Features [stop - start, width] for the tokens of a forward from `start` to `stop`."""

    start: int
    stop: int
    features: mx.array


class PictureEmbedding(Module):
    """Stands in for a table during one forward over tokens [1, L]."""

    def __init__(self, table: Module, rows: Sequence[Rows], scale: float = 1.0) -> None:
        """`rows` are in ascending order. The text model multiplies embeddings by `scale`; features have it already."""
        Module.__init__(self)
        self.table = table
        self._rows, self._scale = tuple(rows), scale

    def __call__(self, ids: mx.array) -> mx.array:
        """Returns the embeddings [1, L, width]."""
        found = cast("mx.array", self.table(ids))
        parts, at = [], 0
        for start, stop, features in self._rows:
            parts += [found[:, at:start], (features / self._scale).astype(found.dtype)[None]]
            at = stop
        return mx.concatenate([*parts, found[:, at:]], axis=1)

    def as_linear(self, x: mx.array) -> mx.array:
        """Computes the logits of a model whose head is this table."""
        return cast("mx.array", self.table.as_linear(x))
