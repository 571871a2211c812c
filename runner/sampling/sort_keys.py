"""Sort keys that rank the tokens of a vocabulary without ties.

A key is a uint64 with the value in the upper half and the token's id (or its distance from the last id) in the lower
half. So equal values, which rounded models often produce, are ordered by id; a threshold selects an exact number of
tokens; and sorting keys sorts values and ids at once.
"""

import mlx.core as mx


def ascending_ids(n: int) -> mx.array:
    """Returns the lower halves of n keys with which, of equal values, the lowest id comes first."""
    return mx.arange(n, dtype=mx.uint64)


def descending_ids(n: int) -> mx.array:
    """Returns the lower halves of n keys with which, of equal values, the lowest id comes last."""
    return mx.arange(n - 1, -1, -1, dtype=mx.uint64)


def keys(values: mx.array, ids: mx.array) -> mx.array:
    """Returns keys [B, N], ascending with `values` (float32 [B, N], none negative), for ids [N] of either kind."""
    # Read as integers, the bits of non-negative floats have the order of the floats.
    return (values.view(mx.uint32).astype(mx.uint64) << 32) | ids


def values_of(keys: mx.array) -> mx.array:
    """Returns the values [B, N] in `keys` [B, N]."""
    return keys.view(mx.float32)[..., 1::2]  # the upper halves: MLX only runs on little-endian machines


def ids_of(keys: mx.array) -> mx.array:
    """Returns the ids, uint32 [B, N], in `keys` [B, N] made with ascending ids."""
    return keys.astype(mx.uint32)
