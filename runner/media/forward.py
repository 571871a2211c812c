"""Forwards of a text model over a prompt with media, and over the answers after such a prompt."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.positional_encoding import RoPE
from mlx.nn.layers.quantized import QuantizedEmbedding

from runner.errors import ModelError
from runner.model.weights.parameters import replace_submodule


class FeatureRows(NamedTuple):
    """The features [stop - start, width] for the tokens from `start` to `stop` of one forward."""

    start: int
    stop: int
    features: mx.array
    one_way: bool = False
    """True if each of these tokens sees only earlier tokens, even where the tokens of a picture see each other."""


class MediaEmbedding(Module):
    """Replaces an embedding table during one forward over tokens [1, L]: features take the place of some embeddings."""

    def __init__(self, table: Module, rows: Sequence[FeatureRows], scale: float = 1.0) -> None:
        """`rows` must be in ascending order. Divides features by `scale`: the text model multiplies all rows by it."""
        Module.__init__(self)
        self.table, self._rows, self._scale = table, tuple(rows), scale

    def __call__(self, ids: mx.array) -> mx.array:
        """Returns the embeddings [1, L, width]."""
        found = cast("mx.array", self.table(ids))
        parts, at = [], 0
        for start, stop, features, _ in self._rows:
            parts += [found[:, at:start], (features / self._scale).astype(found.dtype)[None]]
            at = stop
        return mx.concatenate([*parts, found[:, at:]], axis=1)

    def as_linear(self, x: mx.array) -> mx.array:
        """Returns the logits of a model whose output head is this table."""
        return cast("mx.array", self.table.as_linear(x))


MakeMask = Callable[..., object]


def with_blocks(make_mask: MakeMask, blocks: Sequence[FeatureRows]) -> MakeMask:
    """Returns a `make_mask` for a layer cache that lets the tokens of each block see each other, as tokens of a picture
    do in the sliding layers of Gemma 4. A block must lie in one forward. The window still hides old tokens."""

    def make(count: int, *, window_size: int | None = None, return_array: bool = False) -> object:
        if count == 1:  # a single token has no later token to see
            return make_mask(count, window_size=window_size, return_array=return_array)
        causal = cast("mx.array", make_mask(count, window_size=window_size, return_array=True))
        before = causal.shape[-1] - count  # keys from earlier forwards
        queries = mx.arange(count)[:, None]
        keys = mx.arange(-before, count)[None]
        near = keys > queries - window_size if window_size else mx.array(True)
        for start, stop, *_ in blocks:
            inside = (queries >= start) & (queries < stop) & (keys >= start) & (keys < stop)
            causal = causal | (inside & near)
        return causal

    return make


class Angles(NamedTuple):
    """The cosines and sines of angles, each float32 [L, dimensions / 2]."""

    cosines: mx.array
    sines: mx.array


def angles(positions: Sequence[Sequence[int]], dimensions: int, base: float, sections: Sequence[int]) -> Angles:
    """Returns the angles of L tokens at `positions` [3][L]. The rope rotates `dimensions` numbers of each head.

    In the interleaved form of Qwen, frequencies 1, 4, 7, ... rotate by the row and 2, 5, 8, ... by the column, up to
    the number that `sections` names for each. All other frequencies rotate by the time.
    """
    half = dimensions // 2
    channels = [
        next((channel for channel in (1, 2) if each % 3 == channel and each < 3 * sections[channel]), 0)
        for each in range(half)
    ]
    frequencies = mx.power(base, -mx.arange(half, dtype=mx.float32) / half)
    turned = mx.array([*map(list, positions)], dtype=mx.float32)[mx.array(channels)].T * frequencies
    return Angles(mx.cos(turned), mx.sin(turned))


class AngledRope(Module):
    """Replaces a rope during a forward: rotates all heads by the same given angles."""

    def __init__(self, found: Angles) -> None:
        Module.__init__(self)
        self._angles = found

    def __call__(self, x: mx.array, offset: object = 0) -> mx.array:  # noqa: ARG002 - the angles contain the offset
        """Returns x [1, heads, L, width], rotated."""
        cosines, sines = self._angles
        half = cosines.shape[-1]
        first, second = x[..., :half].astype(mx.float32), x[..., half : 2 * half].astype(mx.float32)
        turned = [first * cosines - second * sines, first * sines + second * cosines]
        return mx.concatenate([*(part.astype(x.dtype) for part in turned), x[..., 2 * half :]], axis=-1)


class ShiftedRope(Module):
    """Replaces a rope during a forward over an answer after pictures: shifts the offsets."""

    def __init__(self, rope: Module, shift: int | mx.array) -> None:
        """`shift` is added to the offsets: one number for all rows of the batch, or an array [B]."""
        Module.__init__(self)
        self._rope = (rope,)  # in a tuple, so that it is no part of the parameters
        self._shift = shift

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Returns x [B, heads, L, width], rotated."""
        return cast("mx.array", self._rope[0](x, offset=offset + self._shift))


_TABLES = ("embed_tokens", "embeddings")
"""The names of an embedding table in mlx-lm's classes."""
_SLIDING = "sliding_attention"


def plain_ids(tokens: Sequence[int], rows: Sequence[FeatureRows]) -> mx.array:
    """Returns `tokens` as ids [1, L] that are all in the vocabulary: 0 stands in the places of `rows`."""
    soft = {index for each in rows for index in range(each.start, each.stop)}
    return mx.array([[0 if index in soft else token for index, token in enumerate(tokens)]])


class MediaForward:
    """Forwards of one text model. During a forward over media, substitutes replace some of the model's modules."""

    def __init__(self, module: Module, *, sections: Sequence[int] = (), sees_both_ways: bool = False) -> None:
        """`sections` are the numbers of frequencies for time, row and column; () for positions of one channel. With
        `sees_both_ways`, the tokens of a picture see each other in layers with a window. Raises ModelError if the
        module lacks an embedding table or plain ropes to replace."""
        self._sections = sections
        self._owner, self._table_name = _table_owner(module)
        self._scale = float(getattr(self._owner, "embed_scale", 1.0))
        self._attentions = [each for _, each in module.named_modules() if "rope" in each] if sections else []
        if sections and not (self._attentions and all(_is_plain(each.rope) for each in self._attentions)):
            raise ModelError("its rope scaling does not work with pictures")
        self._sliding = _first_sliding(self._owner) if sees_both_ways else None

    def __call__(
        self,
        tokens: Sequence[int],
        layers: list[object],
        rows: Sequence[FeatureRows],
        positions: Sequence[Sequence[int]] | None,
        forward: Callable[[mx.array, list[object]], mx.array],
    ) -> mx.array:
        """Returns the lazy logits [1, L, V] of a part of a prompt.

        Soft tokens may have any id. `rows` are the features for this part. `positions` are [3][L], or None if each
        position is the token's offset. `forward` maps tokens [1, L] and layer caches to logits.
        """
        ids = plain_ids(tokens, rows)
        with ExitStack() as stack:
            if rows:
                stack.enter_context(self._embedding(rows))
                blocks = [each for each in rows if not each.one_way]
                if self._sliding is not None and blocks:
                    stack.enter_context(_blocks(layers[self._sliding], blocks))
            if positions is not None:
                rope = self._attentions[0].rope
                angled = AngledRope(angles(positions, rope.dims, rope.base, self._sections))
                stack.enter_context(self._ropes(lambda _: angled))
            return forward(ids, layers)

    @contextmanager
    def shifted(self, shifts: Sequence[int]) -> Iterator[None]:
        """Shifts the positions of every forward in the `with` block: each row of a batch by its number in `shifts`."""
        if not any(shifts):
            yield
            return
        shift = shifts[0] if len(shifts) == 1 else mx.array([*shifts])
        with self._ropes(lambda rope: ShiftedRope(rope, shift)):
            yield

    @contextmanager
    def _embedding(self, rows: Sequence[FeatureRows]) -> Iterator[None]:
        table = self._owner[self._table_name]
        replace_submodule(self._owner, self._table_name, MediaEmbedding(table, rows, self._scale))
        try:
            yield
        finally:
            replace_submodule(self._owner, self._table_name, table)

    @contextmanager
    def _ropes(self, replacement: Callable[[Module], Module]) -> Iterator[None]:
        ropes = [attention.rope for attention in self._attentions]
        try:
            for attention, rope in zip(self._attentions, ropes, strict=True):
                replace_submodule(attention, "rope", replacement(rope))
            yield
        finally:
            for attention, rope in zip(self._attentions, ropes, strict=True):
                replace_submodule(attention, "rope", rope)


def _is_plain(rope: object) -> bool:
    """Returns True for a rope without scaling, the only kind that `angles` can compute."""
    return type(rope) is RoPE and not rope.traditional and rope.scale == 1.0


def _table_owner(module: Module) -> tuple[Module, str]:
    for _, each in module.named_modules():
        for name in _TABLES:
            if isinstance(each.get(name), Embedding | QuantizedEmbedding):
                return each, name
    raise ModelError(f"{type(module).__name__} has no embedding table of a known name")


def _first_sliding(owner: Module) -> int | None:
    """Returns the index of the first layer with a window, whose cache makes all their masks; None without one."""
    kinds = [getattr(layer, "layer_type", "") for layer in cast("list[Module]", owner.layers)]
    return kinds.index(_SLIDING) if _SLIDING in kinds else None


@contextmanager
def _blocks(cache: object, rows: Sequence[FeatureRows]) -> Iterator[None]:
    own = cast("MakeMask", getattr(cache, "make_mask"))  # noqa: B009 - mlx-lm's caches share no class with this method
    setattr(cache, "make_mask", with_blocks(own, rows))  # noqa: B010
    try:
        yield
    finally:
        delattr(cache, "make_mask")
