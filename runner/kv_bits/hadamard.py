"""Keys and values in a few bits a number, rotated first so that little is lost.

A group of numbers is quantized with the steps that its largest ones need. Some channels of keys are far larger than the
others, which then keep little. An orthogonal rotation spreads the large ones over all: a Hadamard matrix H, whose
entries all have one size. Attention stays the same: H q . H k = q . k, and sums of rotated values are rotated back.

At the same number of bits keys lose eight times as much as values (docs/internals/cache.md), so keys get more bits.
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
    """The bits per number of keys and of values."""

    keys: int
    values: int


BITS = {8: Bits(8, 8), 6: Bits(6, 6), 5: Bits(6, 4), 4: Bits(5, 3), 3: Bits(4, 2)}
"""The bits of keys and values for each value of `--kv-bits`, which is their mean."""


class HadamardKVCache:
    """Keeps keys and values rotated and packed. It replaces mlx-lm's QuantizedKVCache, which has one number of bits for
    both, and sizes its buffers wrongly if this does not divide 32. The entry of a token depends on that token alone."""

    adapter: ClassVar = KVState

    def __init__(self, group_size: int, bits: int) -> None:
        """`bits` is a key of BITS; `group_size` numbers, which divide every width, share a scale."""
        self.keys: Packed | None = None
        self.values: Packed | None = None
        self.offset = 0
        self.group_size = group_size
        self.mean_bits = bits

    @property
    def bits(self) -> Bits:
        """The bits of keys and values, which mlx-lm passes to `attend`."""
        return BITS[self.mean_bits]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Packed, Packed]:
        """Appends keys and values [B, heads, tokens, width]; returns all of them."""
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
        """Returns the mask of a forward over `count` tokens that come next."""
        return create_attention_mask(count, self.offset, return_array, window_size)  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, including room for tokens to come."""
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
    """Returns x [..., width], multiplied by a Hadamard matrix: in blocks of the largest power of two that divides the
    width. Done twice it gives x."""
    block = x.shape[-1] & -x.shape[-1]
    exact = x.astype(mx.float32).reshape(*x.shape[:-1], -1, block)  # in 16 bits, each of its many sums would be rounded
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
    """Returns the attention [B, heads, L, width] of queries of that shape to the keys and values of a HadamardKVCache.
    A mask is added to the scores [B, heads, L, tokens], or is true for visible tokens, or "causal"."""
    shape, kv_heads = queries.shape, keys[0].shape[1]
    rows = rotated(queries * scale).reshape(shape[0], kv_heads, -1, shape[3])  # of all heads that share keys
    scores = mx.quantized_matmul(rows, *keys, transpose=True, group_size=group_size, bits=bits.keys)
    scores = scores.reshape(*shape[:3], -1)
    if isinstance(mask, str):
        mask = cast("mx.array", base.create_causal_mask(shape[2], scores.shape[3] - shape[2]))
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min) if mask.dtype == mx.bool_ else scores + mask
    weights = mx.softmax(scores, axis=-1, precise=True).reshape(*rows.shape[:3], -1)
    found = mx.quantized_matmul(weights, *values, transpose=False, group_size=group_size, bits=bits.values)
    return rotated(found).reshape(*shape[:3], -1)


base.quantized_scaled_dot_product_attention = attend  # type: ignore[assignment]  # no other cache has bits
