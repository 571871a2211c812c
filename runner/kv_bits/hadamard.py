"""Keys and values in a few bits a number. They are rotated before they are quantized, so that little is lost.

All numbers of a group are quantized in equal steps, which must be wide enough for the largest numbers. Some channels of
keys are far larger than the others, so the smaller channels would lose most. A rotation by a Hadamard matrix H, whose
entries all have the same size, spreads the large channels over all. Attention stays the same: H q . H k = q . k, and
sums of rotated values are rotated back.

With equal bits, keys lose eight times as much as values (docs/internals/cache.md), so keys get more bits.
"""

from typing import ClassVar, NamedTuple, cast

import runner.process.lean_mlx_lm  # noqa: F401  # isort: skip  # before anything of mlx_lm is imported

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import create_attention_mask

from runner.cache.layers.kv import STEP, KVState

Packed = tuple[mx.array, mx.array, mx.array]
"""Words [B, heads, tokens, width * bits / 32], scales and biases [B, heads, tokens, width / group]."""


class Bits(NamedTuple):
    """The bits of each number in keys and in values."""

    keys: int
    values: int


BITS = {8: Bits(8, 8), 6: Bits(6, 6), 5: Bits(6, 4), 4: Bits(5, 3), 3: Bits(4, 2)}
"""The bits for each value of `--kv-bits`, which is the mean of the bits of keys and of values."""


class HadamardKVCache:
    """A layer cache with rotated and packed keys and values. It replaces mlx-lm's QuantizedKVCache, which has equal
    bits for both, and buffers of a wrong size if the bits do not divide 32. Each entry depends on one token."""

    adapter: ClassVar = KVState

    def __init__(self, group_size: int, bits: int) -> None:
        """`bits` is a key of BITS. `group_size` numbers share a scale; it must divide the widths of keys and values."""
        self.keys: Packed | None = None
        self.values: Packed | None = None
        self.offset = 0
        self.group_size = group_size
        self.mean_bits = bits

    @property
    def bits(self) -> Bits:
        """The bits of keys and values. mlx-lm passes this attribute to `attend`."""
        return BITS[self.mean_bits]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        """Appends keys and values [B, heads, tokens, width]. Returns the keys and values of all tokens so far."""
        self.keys = self._appended(self.keys, keys, self.bits.keys)
        self.values = self._appended(self.values, values, self.bits.values)
        self.offset += keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Packed, Packed]:
        """Returns the keys and values of all tokens so far, at least one."""
        found = [tuple(x[..., : self.offset, :] for x in buffers or ()) for buffers in (self.keys, self.values)]
        return cast("tuple[Packed, Packed]", tuple(found))

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Returns the mask of a forward over the next `count` tokens."""
        return create_attention_mask(count, self.offset, return_array, window_size)  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, including room for later tokens."""
        return sum(x.nbytes for buffers in (self.keys, self.values) for x in buffers or ())

    def _appended(self, buffers: Packed | None, entries: mx.array, bits: int) -> Packed:
        start, stop = self.offset, self.offset + entries.shape[2]
        parts = mx.quantize(rotated(entries), group_size=self.group_size, bits=bits)
        if buffers is None or stop > buffers[0].shape[2]:
            before = [[]] * len(parts) if buffers is None else [[x[..., :start, :]] for x in buffers]
            room = [mx.zeros((*x.shape[:2], -stop % STEP, x.shape[3]), x.dtype) for x in parts]
            grown = (mx.concatenate([*old, *new], axis=2) for old, *new in zip(before, parts, room, strict=True))
            return cast("Packed", tuple(grown))
        for buffer, part in zip(buffers, parts, strict=True):
            buffer[..., start:stop, :] = part
        return buffers


def rotated(x: mx.array) -> mx.array:
    """Returns x [..., width], multiplied by a Hadamard matrix in blocks of the largest power of two that divides the
    width. The rotation of the result is x."""
    block = x.shape[-1] & -x.shape[-1]
    exact = x.astype(mx.float32).reshape(*x.shape[:-1], -1, block)  # in 16 bits, every sum would be rounded
    return mx.hadamard_transform(exact).reshape(x.shape).astype(x.dtype)


def attend(
    queries: mx.array,
    keys: Packed,
    values: Packed,
    scale: float,
    mask: mx.array | str | None,
    group_size: int,
    bits: Bits,
) -> mx.array:
    """Returns the attention of `queries` [B, heads, L, width], in the same shape, to the keys and values of a
    HadamardKVCache. `mask` is added to the scores [B, heads, L, tokens], or true for visible tokens, or "causal"."""
    shape, kv_heads = queries.shape, keys[0].shape[1]
    rows = rotated(queries * scale).reshape(shape[0], kv_heads, -1, shape[3])  # queries of all heads that share keys
    scores = mx.quantized_matmul(rows, *keys, transpose=True, group_size=group_size, bits=bits.keys)
    scores = scores.reshape(*shape[:3], -1)
    if isinstance(mask, str):
        mask = cast("mx.array", base.create_causal_mask(shape[2], scores.shape[3] - shape[2]))
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min) if mask.dtype == mx.bool_ else scores + mask
    weights = mx.softmax(scores, axis=-1, precise=True).reshape(*rows.shape[:3], -1)
    found = mx.quantized_matmul(weights, *values, transpose=False, group_size=group_size, bits=bits.values)
    return rotated(found).reshape(*shape[:3], -1)


base.quantized_scaled_dot_product_attention = attend  # type: ignore[assignment]  # only for caches with `bits`
