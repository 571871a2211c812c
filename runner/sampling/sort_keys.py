"""Sort keys that rank the tokens of a vocabulary without ties.

A key is a uint64: a value's place in the order in its upper half, the token's id (or what is left to the last id) in
its lower half. So equal values, which rounded models produce all the time, come in the order of their ids; a threshold
cuts off an exact number of tokens; and sorting keys is sorting values and ids at once.
"""

import mlx.core as mx


def ascending_ids(n: int) -> mx.array:
    """The lower halves of n keys such that of equal values the lowest id comes first."""
    return mx.arange(n, dtype=mx.uint64)


def descending_ids(n: int) -> mx.array:
    """The lower halves of n keys such that of equal values the lowest id comes last."""
    return mx.arange(n - 1, -1, -1, dtype=mx.uint64)


def keys(values: mx.array, ids: mx.array) -> mx.array:
    """Keys [B, N], ascending with `values` (float32 [B, N], none negative), from one of the two kinds of ids [N]."""
    # The bits of floats that are not negative, read as integers, stand in the order of the floats.
    return (values.view(mx.uint32).astype(mx.uint64) << 32) | ids


def values_of(keys: mx.array) -> mx.array:
    """The values [B, N] that `keys` [B, N] were made of."""
    return keys.view(mx.float32)[..., 1::2]  # the upper halves: everything that MLX runs on is little-endian


def ids_of(keys: mx.array) -> mx.array:
    """The ids, uint32 [B, N], of `keys` [B, N] that were made with ascending ids."""
    return keys.astype(mx.uint32)
