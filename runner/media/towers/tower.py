"""The interface of all towers, and computing in pieces.

A tower turns the patches of one picture, or the rows of one sound, into rows of a text model's prompt. It computes in
pieces bounded by `MediaTower.piece_bytes` and yields after each, so that other work can be done in between.
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
"""Yields lazy arrays to evaluate one after the other, and returns the result."""

_SCORE_BYTES = 4
"""The most bytes of an attention score: MLX's CPU backend makes scores in the type of the queries."""
_PIECE_BYTES = {mx.cpu: 8 << 20, mx.gpu: 64 << 20}
"""A CPU takes about 50 ms for 8 MiB of scores, and is no faster with more of them at once."""
_FUSED_WIDTHS = (64, 80, 128)
"""Widths of a head for which GPUs have a kernel that holds no scores in memory."""


class Grid(NamedTuple):
    """The patches of one picture."""

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
    """(pattern, replacement) for the beginnings of tensor names: the first pattern that matches turns a name into that
    of a parameter. A name that matches none is not the tower's."""
    piece_bytes: int
    """The most bytes of attention scores, or of the widest rows of a layer, that are computed at once."""
    width: int
    """The width of its output and of the text model."""

    def __init__(self, config: Config) -> None:
        """Makes the tower that a whole `config.json` describes, with random, lazy parameters. Raises ModelError for
        nonsense."""
        super().__init__()
        self.piece_bytes = _PIECE_BYTES[mx.default_device().type]
        self.width = size(section(config, "text_config") or section(config, "llm_config") or config, "hidden_size")

    @classmethod
    def parameter_name(cls, name: str) -> str | None:
        """Returns the parameter for the tensor `name` of a checkpoint; None if it is not the tower's."""
        for pattern, replacement in cls.names:
            if match := re.match(pattern, name):
                return match.expand(replacement) + name[match.end() :]
        return None

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Returns the weights under the names and in the shapes of this module's parameters. May change the module to
        fit the shapes.

        The weights have the names that `names` gives, and are arrays or placeholders. Words, scales and biases of
        packed tensors pass separately under the name of the weight: rename or drop them, compute with dense ones only.
        """
        return weights


class Tower(MediaTower):
    """One family's encoder of pictures."""

    family: ClassVar[type[PictureFamily]]

    @abstractmethod
    def encode(self, patches: mx.array, grid: Grid) -> Iterator[mx.array]:
        """Yields lazy arrays to be evaluated in turn; the last one is the features [soft tokens, width].

        `patches` is uint8 [count, values], in the family's order. The features stand in the place of rows of the text
        model's embedding table.
        """

    @abstractmethod
    def encode_bytes(self, grid: Grid) -> int:
        """Returns an estimate of the most bytes that encoding such a picture takes at any moment, without weights."""


class SoundTower(MediaTower):
    """One family's encoder of sounds."""

    family: ClassVar[type[SoundFamily]]
    absent: ClassVar[str]
    """The fault of a model with its description but none of its tensors, in Ollama's words."""

    @abstractmethod
    def encode(self, rows: mx.array, lengths: Sequence[int]) -> Iterator[mx.array]:
        """Yields lazy arrays to be evaluated in turn; the last one is the features [soft tokens, width], of all pieces.

        `rows` is float32 [count, values], piece after piece; `lengths` are the rows of each piece. Each piece is heard
        by itself.
        """

    @abstractmethod
    def encode_bytes(self, lengths: Sequence[int]) -> int:
        """Returns an estimate of the most bytes that encoding such a sound takes at any moment, without weights."""


def in_pieces(
    function: Callable[[slice], mx.array], count: int, row_bytes: int, piece_bytes: int, axis: int = 0
) -> Steps:
    """Joins along `axis` the results of `function` for pieces of `count` rows, of at most `piece_bytes` and at least
    one row. No row may depend on another one. `row_bytes` is the size of the widest array that it makes of a row."""
    parts: list[mx.array] = []
    rows = max(1, piece_bytes // max(1, row_bytes))
    for start in range(0, count, rows):
        if parts:
            yield parts[-1]
        parts.append(function(slice(start, min(start + rows, count))))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis)


def attend_in_pieces(queries: mx.array, keys: mx.array, values: mx.array, scale: float, piece_bytes: int) -> Steps:
    """Computes attention [1, heads, Q, d] of `queries` [1, heads, Q, d] over `keys` and `values` [1, heads, K, d], in
    blocks of queries."""
    _, heads, count, width = queries.shape
    fused = next((each for each in _FUSED_WIDTHS if each >= width), width)
    if fused != width and mx.default_device() != mx.Device(mx.cpu):
        wider = [(0, 0)] * 3 + [(0, fused - width)]
        queries, keys, values = (mx.pad(each, wider) for each in (queries, keys, values))
    row_bytes = heads * keys.shape[2] * _SCORE_BYTES
    if count * row_bytes > piece_bytes:  # else each block would make its own copy
        keys, values = mx.contiguous(keys), mx.contiguous(values)

    def block(rows: slice) -> mx.array:
        return mx.fast.scaled_dot_product_attention(queries[:, :, rows], keys, values, scale=scale)

    result = yield from in_pieces(block, count, row_bytes, piece_bytes, axis=2)
    return result[..., :width]


def work_bytes(dtype: mx.Dtype) -> int:
    """Returns the bytes of a number of that type during computation: MLX's CPU backend widens 16 bits."""
    return 4 if mx.default_device() == mx.Device(mx.cpu) else dtype.size


def embedding_bytes(count: int, values: int, row_bytes: int) -> int:
    """Returns the most bytes that embedding `count` patches of `values` numbers takes, as measured with MLX's CPU
    backend."""
    return count * (values * (1 + 5 * 4) + 6 * row_bytes)
