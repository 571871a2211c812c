"""Forwards of a text model over a prompt with pictures, and over answers behind one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding

from runner.errors import ModelError
from runner.model.pictures.embedding import PictureEmbedding, Rows
from runner.model.pictures.masks import MakeMask, with_blocks
from runner.model.pictures.rope import AngledRope, ShiftedRope, angles, is_plain

_TABLES = ("embed_tokens", "embeddings")
"""The names of an embedding table in mlx-lm's classes."""
_SLIDING = "sliding_attention"


class PictureForward:
    """The parts of one text model that pictures replace for the time of a forward.

    Other forwards are not touched: without rows, positions and shifts these do nothing but call the model.
    """

    def __init__(
        self,
        module: Module,
        *,
        sections: Sequence[int] = (),
        sees_both_ways: bool = False,
    ) -> None:
        """`sections` are the numbers of frequencies for time, row and column, where positions have three channels.
        `sees_both_ways`: the tokens of a picture see each other in layers with a window.

        Raises ModelError for a module that has no such parts.
        """
        self._sections = sections
        self._owner, self._table_name = _table_owner(module)
        self._scale = float(getattr(self._owner, "embed_scale", 1.0))
        self._attentions = [each for _, each in module.named_modules() if "rope" in each] if sections else []
        if sections and not (self._attentions and all(is_plain(each.rope) for each in self._attentions)):
            raise ModelError("its positions are scaled in a way that pictures are not made for")
        self._sliding = _first_sliding(self._owner) if sees_both_ways else None

    def __call__(
        self,
        tokens: Sequence[int],
        layers: list[object],
        rows: Sequence[Rows],
        positions: Sequence[Sequence[int]] | None,
        forward: Callable[[mx.array, list[object]], mx.array],
    ) -> mx.array:
        """Returns the lazy logits [1, L, V] of a part of a prompt.

        Soft tokens may have any id: they are looked up as 0. `rows` are the features for this part; `positions` [3][L]
        are None where they are the offsets. `forward` maps tokens [1, L] and layer caches to logits.
        """
        soft = {index for each in rows for index in range(each.start, each.stop)}
        ids = mx.array([[0 if index in soft else token for index, token in enumerate(tokens)]])
        with ExitStack() as stack:
            if rows:
                stack.enter_context(self._embedding(rows))
                if self._sliding is not None:
                    stack.enter_context(_blocks(layers[self._sliding], rows))
            if positions is not None:
                stack.enter_context(self._ropes(self._rope_for(positions)))
            return forward(ids, layers)

    @contextmanager
    def shifted(self, shifts: Sequence[int]) -> Iterator[None]:
        """Shifts the positions of every forward inside: those of each row of a batch by its own number."""
        if not any(shifts):
            yield
            return
        shift = shifts[0] if len(shifts) == 1 else mx.array([*shifts])
        with self._ropes(lambda rope: ShiftedRope(rope, shift)):
            yield

    def _rope_for(self, positions: Sequence[Sequence[int]]) -> Callable[[Module], Module]:
        rope = self._attentions[0].rope
        found = angles(positions, rope.dims, rope.base, self._sections)
        return lambda _: AngledRope(found)

    @contextmanager
    def _embedding(self, rows: Sequence[Rows]) -> Iterator[None]:
        table = self._owner[self._table_name]
        self._owner[self._table_name] = PictureEmbedding(table, rows, self._scale)
        try:
            yield
        finally:
            self._owner[self._table_name] = table

    @contextmanager
    def _ropes(self, replacement: Callable[[Module], Module]) -> Iterator[None]:
        ropes = [attention.rope for attention in self._attentions]
        try:
            for attention, rope in zip(self._attentions, ropes, strict=True):
                attention["rope"] = replacement(rope)
            yield
        finally:
            for attention, rope in zip(self._attentions, ropes, strict=True):
                attention["rope"] = rope


class _Table(NamedTuple):
    owner: Module
    name: str


def _table_owner(module: Module) -> _Table:
    for _, each in module.named_modules():
        for name in _TABLES:
            if isinstance(each.get(name), Embedding | QuantizedEmbedding):
                return _Table(each, name)
    raise ModelError(f"{type(module).__name__} has no embedding table that is known here")


def _first_sliding(owner: Module) -> int | None:
    """Returns the layer whose cache makes the masks of all layers with a window."""
    kinds = [getattr(layer, "layer_type", "") for layer in cast("list[Module]", owner.layers)]
    return kinds.index(_SLIDING) if _SLIDING in kinds else None


@contextmanager
def _blocks(cache: object, rows: Sequence[Rows]) -> Iterator[None]:
    own = cast("MakeMask", getattr(cache, "make_mask"))  # noqa: B009 - mlx-lm's caches share no class that has it
    setattr(cache, "make_mask", with_blocks(own, rows))  # noqa: B010
    try:
        yield
    finally:
        delattr(cache, "make_mask")
