"""Keys and values that are rotated, packed in few bits, and attended to as they are."""

from itertools import accumulate, pairwise

import mlx.core as mx
import pytest

from runner.kv_bits.hadamard import BITS, HadamardKVCache, Packed, attend, rotated
from runner.settings import Settings, flags_of

GROUP, HEADS, KV_HEADS, TOKENS = 32, 4, 2, 300


def drawn(*shape: int, seed: int = 1) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def filled(bits: int, cuts: tuple[int, ...], width: int = 64, dtype: mx.Dtype = mx.float32) -> HadamardKVCache:
    """A cache with the same tokens, whichever forwards wrote them."""
    cache = HadamardKVCache(GROUP, bits)
    keys, values = (drawn(1, KV_HEADS, TOKENS, width, seed=seed).astype(dtype) for seed in (2, 3))
    for start, stop in pairwise((0, *cuts, TOKENS)):
        cache.update_and_fetch(keys[:, :, start:stop], values[:, :, start:stop])
    return cache


def unpacked(parts: Packed, bits: int) -> mx.array:
    return rotated(mx.dequantize(*parts, group_size=GROUP, bits=bits))


def requantized(x: mx.array) -> mx.array:
    return mx.dequantize(*mx.quantize(x, group_size=64, bits=4), group_size=64, bits=4)


def test_the_flag_offers_these_bits_and_means_their_mean() -> None:
    assert flags_of(Settings)["kv_bits"].choices == (*map(str, BITS), "off")
    assert [sum(bits) / 2 for bits in BITS.values()] == [*BITS]


@pytest.mark.parametrize("width", [32, 64, 96, 128, 160, 256])
def test_a_rotation_keeps_products_and_is_its_own_inverse(width: int) -> None:
    x, y = drawn(3, width), drawn(5, width, seed=2)
    assert mx.allclose(rotated(rotated(x)), x, atol=1e-5)
    assert mx.allclose(rotated(x) @ rotated(y).T, x @ y.T, atol=1e-4)


def test_a_channel_that_is_far_larger_than_others_costs_them_nothing() -> None:
    keys = drawn(1, 1, TOKENS, 64) * mx.array([40.0] + [1.0] * 63)
    kept = rotated(requantized(rotated(keys))), requantized(keys)
    errors = [mx.abs(each - keys)[..., 1:].mean() for each in kept]
    assert errors[0] < errors[1] / 2


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_what_is_held_does_not_depend_on_the_forwards(bits: int, dtype: mx.Dtype) -> None:
    """To the bit, as the trie and the disk want it; and the buffers hold the bits that were asked for, in steps of
    256 tokens."""
    at_once = filled(bits, (), dtype=dtype)
    for cuts in ((1,), (255, 256, 257), (7, 290), tuple(accumulate([29] * 10))):
        other = filled(bits, cuts, dtype=dtype)
        for one, same in zip(at_once.keys_and_values(), other.keys_and_values(), strict=True):
            assert all(mx.array_equal(x, y) for x, y in zip(one, same, strict=True))
    numbers = 2 * KV_HEADS * 512 * 64
    scales = 2 * numbers // GROUP
    assert at_once.nbytes == numbers * bits // 8 + scales * dtype.size


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [64, 96])
@pytest.mark.parametrize("mask", ["none", "causal", "visible", "added", "by head"])
def test_attention_to_packed_keys_is_that_to_the_unpacked_ones(bits: int, width: int, mask: str) -> None:
    cache = filled(bits, (), width)
    keys, values = cache.keys_and_values()
    count = 1 if mask == "none" else 5
    visible = drawn(1, HEADS if mask == "by head" else 1, count, TOKENS, seed=5) > 0
    given = {"none": None, "causal": "causal", "added": mx.where(visible, 0.0, -1e9)}.get(mask, visible)
    queries = drawn(1, HEADS, count, width, seed=4)
    before = mx.array(queries)
    found = attend(queries, keys, values, 0.1, given, cache.group_size, cache.bits)
    whole = (unpacked(keys, cache.bits.keys), unpacked(values, cache.bits.values))
    wanted = mx.fast.scaled_dot_product_attention(before, *whole, scale=0.1, mask=given)
    assert found.shape == (1, HEADS, count, width)
    assert mx.allclose(found, wanted, atol=1e-4)
    assert mx.array_equal(queries, before)
