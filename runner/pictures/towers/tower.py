"""The interface of all towers, and what their encoders share: computing in pieces.

A tower turns the patches of one picture into rows that stand in a text model's prompt. It computes in pieces bounded by
`Tower.piece_bytes`, so that other work can be done in between, and yields after each.
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import ClassVar, NamedTuple, Self

import mlx.core as mx
from mlx.nn.layers.base import Module

Steps = Generator[mx.array, None, mx.array]
"""Yields lazy arrays to evaluate one after the other, and returns the result; used with `yield from`."""

_SCORE_BYTES = 4
"""Of one attention score: MLX's CPU backend makes them in the type of the queries, float32 at most."""
_PIECE_BYTES = {mx.cpu: 8 << 20, mx.gpu: 64 << 20}
"""A CPU takes about 50 ms for 8 MiB of scores, and is no faster with more of them at once."""
_FUSED_WIDTHS = (64, 80, 128)
"""Widths of a head for which GPUs have a kernel that keeps no scores."""


class Grid(NamedTuple):
    """The patches of one picture as the tower sees them."""

    rows: int
    columns: int

    @property
    def patches(self) -> int:
        return self.rows * self.columns


class Layer(Module):
    """A module of a tower."""

    def __init__(self) -> None:
        Module.__init__(self)  # MLX's is not typed


class Tower(Layer):
    """One family's encoder of pictures. Owner: the engine thread, like every array."""

    names: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(pattern, replacement) for tensor names. The first pattern that matches the beginning of a name makes the name of
    a parameter of it: the match is replaced, the rest stays. Names that match none are not the tower's."""
    piece_bytes: int
    """Bound for attention scores, and for the widest rows of a layer, that are computed at once."""
    width: int
    """Of its output: the width of the text model."""

    def __init__(self) -> None:
        super().__init__()
        self.piece_bytes = _PIECE_BYTES[mx.default_device().type]

    @classmethod
    def fits(cls, config: Mapping[str, object]) -> bool:  # noqa: ARG003 - for families with several classes
        """Returns True if this class is the one for a whole `config.json`, of those that its family has."""
        return True

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        """Returns the tower that a whole `config.json` describes, its parameters still random and lazy.

        Raises ModelError for a description that cannot be meant.
        """

    @classmethod
    def parameter_name(cls, name: str) -> str | None:
        """Returns the parameter that the tensor `name` of a checkpoint becomes; None if it is not the tower's."""
        for pattern, replacement in cls.names:
            if match := re.match(pattern, name):
                return match.expand(replacement) + name[match.end() :]
        return None

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Returns the weights under the names and in the shapes of this module's parameters.

        They come under the names that `names` gives, as arrays or placeholders. Of packed tensors, words, scales and
        biases pass separately under the name of the weight: rename or drop them, compute with dense ones only. May
        change the module to fit the shapes it finds.
        """
        return weights

    @abstractmethod
    def encode(self, patches: mx.array, grid: Grid) -> Iterator[mx.array]:
        """Yields lazy arrays to be evaluated in turn; the last one is the features [soft tokens, width].

        `patches` is uint8 [count, values], in the family's order. The features are as the text model expects them,
        before anything that its class does behind the embedding table.
        """

    @abstractmethod
    def encode_bytes(self, grid: Grid) -> int:
        """Returns an estimate of the most bytes that encoding such a picture takes at any moment, without weights."""


def pieces(count: int, row_bytes: int, piece_bytes: int) -> Iterator[slice]:
    """Cuts `count` rows of `row_bytes` into pieces of at most `piece_bytes`, and of one row at least."""
    rows = max(1, piece_bytes // max(1, row_bytes))
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))


def in_pieces(
    function: Callable[[slice], mx.array], count: int, row_bytes: int, piece_bytes: int, axis: int = 0
) -> Steps:
    """Joins along `axis` what `function` returns for the rows of each piece. No row may depend on another one.

    `row_bytes` are those of the widest array that it makes of a row.
    """
    parts: list[mx.array] = []
    for rows in pieces(count, row_bytes, piece_bytes):
        if parts:
            yield parts[-1]
        parts.append(function(rows))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis)


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    piece_bytes: int,
    mask: mx.array | None = None,
) -> Steps:
    """Computes attention of `queries` [B, heads, Q, d] over `keys` and `values` [B, heads, K, d] in blocks of queries.

    `mask` is bool or added, and broadcasts to [B, heads, Q, K]. Returns [B, heads, Q, d].
    """
    batch, heads, count, width = queries.shape
    fused = next((each for each in _FUSED_WIDTHS if each >= width), width)
    if fused != width and mx.default_device() != mx.Device(mx.cpu):
        wider = [(0, 0)] * 3 + [(0, fused - width)]
        queries, keys, values = (mx.pad(each, wider) for each in (queries, keys, values))
    blocks = list(pieces(count, batch * heads * keys.shape[2] * _SCORE_BYTES, piece_bytes))
    if len(blocks) > 1:  # else each block would make its own copy
        keys, values = mx.contiguous(keys), mx.contiguous(values)
    parts: list[mx.array] = []
    for rows in blocks:
        if parts:
            yield parts[-1]
        part_mask = mask[..., rows, :] if mask is not None and mask.ndim > 1 and mask.shape[-2] > 1 else mask
        parts.append(
            mx.fast.scaled_dot_product_attention(queries[:, :, rows], keys, values, scale=scale, mask=part_mask)
        )
    result = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
    return result[..., :width]
