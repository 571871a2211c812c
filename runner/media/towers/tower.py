"""The interface of all towers, and computing in pieces.

A tower turns the patches of one picture, or the rows of one sound, into rows of a text model's prompt. The tower
computes in pieces bounded by `MediaTower.piece_bytes`. It yields after each piece, so that other work can run.
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import ClassVar, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module

from runner.media.families import PictureFamily, SoundFamily
from runner.model.fields import Config, section, size

Steps = Generator[mx.array, None, mx.array]
"""A computation that yields lazy arrays, which the caller evaluates in turn, and returns the lazy result."""

_SCORE_BYTES = 4
"""The most bytes of one attention score: MLX's CPU backend makes scores in the type of the queries."""
_PIECE_BYTES = {mx.cpu: 8 << 20, mx.gpu: 64 << 20}
"""The default `piece_bytes`. A CPU computes 8 MiB of scores in about 50 ms; larger pieces are no faster."""
_FUSED_WIDTHS = (64, 80, 128)
"""The widths of a head for which MLX has a GPU kernel that keeps no scores in memory."""


class Grid(NamedTuple):
    """The numbers of rows and columns of the patches of one picture."""

    rows: int
    columns: int

    @property
    def patches(self) -> int:
        return self.rows * self.columns

    def places(self) -> tuple[mx.array, mx.array]:
        """Returns the row and the column of each patch, from left to right and top to bottom."""
        order = mx.arange(self.patches)
        return order // self.columns, order % self.columns


class TowerLayer(Module):
    """A module of a tower, with a typed `__init__`."""

    def __init__(self) -> None:
        Module.__init__(self)


class MediaTower(TowerLayer):
    """One family's encoder of one kind of media. Owner: the engine thread, like every array."""

    names: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(pattern, replacement) for the beginnings of tensor names. The first pattern that matches turns the name of a
    tensor into the name of a parameter. A tensor whose name matches no pattern does not belong to the tower."""
    piece_bytes: int
    """The most bytes of attention scores, or of the widest rows of a layer, that are computed at once."""
    width: int
    """The width of the tower's features, equal to that of the text model."""

    def __init__(self, config: Config) -> None:
        """Makes the tower that a whole `config.json` describes, with random, lazy parameters. Raises ModelError for
        invalid fields."""
        super().__init__()
        self.piece_bytes = _PIECE_BYTES[mx.default_device().type]
        self.width = size(section(config, "text_config") or section(config, "llm_config") or config, "hidden_size")

    @classmethod
    def parameter_name(cls, name: str) -> str | None:
        """Returns the name of the parameter for the tensor `name`; None if the tensor does not belong to the tower."""
        for pattern, replacement in cls.names:
            if match := re.match(pattern, name):
                return match.expand(replacement) + name[match.end() :]
        return None

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Returns the weights under the names and in the shapes of this module's parameters. May change the module to
        fit the shapes.

        `weights` are arrays or placeholders, named by `parameter_name`. The words, scales and biases of packed tensors
        come in calls of their own, under the name of the weight. A subclass must compute with dense tensors only.
        """
        return weights


class Tower(MediaTower):
    """One family's encoder of pictures."""

    family: ClassVar[type[PictureFamily]]

    @abstractmethod
    def encode(self, patches: mx.array, grid: Grid) -> Iterator[mx.array]:
        """Yields lazy arrays, which the caller evaluates in turn. The last array is the features [soft tokens, width].

        `patches` is uint8 [count, values], in the family's order. The features replace rows of the text model's
        embedding table.
        """

    @abstractmethod
    def encode_bytes(self, grid: Grid) -> int:
        """Returns an estimate of the most bytes that encoding a picture of `grid` needs at once, without weights."""


class SoundTower(MediaTower):
    """One family's encoder of sounds."""

    family: ClassVar[type[SoundFamily]]
    absent: ClassVar[str]
    """The fault, in Ollama's words, of a model that has the config of this tower, but none of its tensors."""

    @abstractmethod
    def encode(self, rows: mx.array, lengths: Sequence[int]) -> Iterator[mx.array]:
        """Yields lazy arrays, which the caller evaluates in turn. The last array is the features [soft tokens, width].

        `rows` is float32 [count, values], piece after piece; `lengths` are the numbers of rows of the pieces. The tower
        encodes each piece by itself.
        """

    @abstractmethod
    def encode_bytes(self, lengths: Sequence[int]) -> int:
        """Returns an estimate of the most bytes that encoding a sound of `lengths` needs at once, without weights."""


def in_pieces(
    function: Callable[[slice], mx.array], count: int, row_bytes: int, piece_bytes: int, axis: int = 0
) -> Steps:
    """Joins, along `axis`, the results of `function` for pieces of `count` rows, each of at most `piece_bytes` but at
    least one row. `row_bytes` is the size of the widest array made of a row. A row must not depend on other rows."""
    parts: list[mx.array] = []
    rows = max(1, piece_bytes // max(1, row_bytes))
    for start in range(0, count, rows):
        if parts:
            yield parts[-1]
        parts.append(function(slice(start, min(start + rows, count))))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis)


def attend_in_pieces(queries: mx.array, keys: mx.array, values: mx.array, scale: float, piece_bytes: int) -> Steps:
    """Returns attention [1, heads, Q, d] of `queries` [1, heads, Q, d] over `keys` and `values` [1, heads, K, d].
    Computes one block of queries after another."""
    _, heads, count, width = queries.shape
    fused = next((each for each in _FUSED_WIDTHS if each >= width), width)
    if fused != width and mx.default_device() != mx.Device(mx.cpu):
        wider = [(0, 0)] * 3 + [(0, fused - width)]
        queries, keys, values = (mx.pad(each, wider) for each in (queries, keys, values))
    row_bytes = heads * keys.shape[2] * _SCORE_BYTES
    if count * row_bytes > piece_bytes:  # else each block of queries would copy both arrays
        keys, values = mx.contiguous(keys), mx.contiguous(values)

    def block(rows: slice) -> mx.array:
        return mx.fast.scaled_dot_product_attention(queries[:, :, rows], keys, values, scale=scale)

    result = yield from in_pieces(block, count, row_bytes, piece_bytes, axis=2)
    return result[..., :width]


def work_bytes(dtype: mx.Dtype) -> int:
    """Returns the bytes of a number of this type in a computation: MLX's CPU backend widens 16 bits to 32."""
    return 4 if mx.default_device() == mx.Device(mx.cpu) else dtype.size


def embedding_bytes(count: int, values: int, row_bytes: int) -> int:
    """Returns the most bytes that embedding `count` patches of `values` numbers needs. The factors were measured with
    MLX's CPU backend."""
    return count * (values * (1 + 5 * 4) + 6 * row_bytes)
