"""Finds the quantization of a packed tensor from shapes and from the type of the scales.

In real stores, metadata may be wrong or missing (docs/internals/store.md, 2.4). Shapes are reliable, because a module
knows the width of each layer's input.
"""

import math
from typing import NamedTuple

from runner.errors import ModelError
from runner.model.sources.checkpoint import LogicalTensor
from runner.model.sources.safetensors import FLOAT_DTYPES

WORD_BITS = 32
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
FLOAT_MODES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}
"""(bits, group size) -> MLX's mode, for tensors whose scales are bytes."""


class Packing(NamedTuple):
    """The arguments of the call of `mx.quantize` that packed a tensor."""

    bits: int
    group_size: int
    mode: str


def find_packing(in_dims: int, words: int, groups: int, *, byte_scales: bool) -> Packing | None:
    """Returns the packing of `in_dims` values in `words` 32-bit words with `groups` scales; None if MLX has none."""
    if min(in_dims, words, groups) < 1 or words * WORD_BITS % in_dims or in_dims % groups:
        return None
    bits, group_size = words * WORD_BITS // in_dims, in_dims // groups
    if byte_scales:
        mode = FLOAT_MODES.get((bits, group_size))
        return Packing(bits, group_size, mode) if mode else None
    legal = bits in AFFINE_BITS and group_size in AFFINE_GROUPS
    return Packing(bits, group_size, "affine") if legal else None


def possible_packings(words: int, groups: int, *, byte_scales: bool) -> list[Packing]:
    """Returns every packing that MLX has for `words` 32-bit words with `groups` scales, for any number of values."""
    widths = {words * WORD_BITS // bits for bits in AFFINE_BITS}
    found = (find_packing(width, words, groups, byte_scales=byte_scales) for width in sorted(widths))
    return [one for one in found if one is not None]


def check_companions(tensor: LogicalTensor) -> None:
    """Raises ModelError unless the tensor's words, scales and biases fit together for at least one input width."""
    words, scale, bias = tensor.weight, tensor.scale, tensor.bias
    where = f"{words.file}: tensor {tensor.name}"
    if scale is None:
        return
    if words.dtype != "U32" or len(words.shape) < 2:
        raise ModelError(f"{where}: want packed U32 words with scales, found {words.dtype} {list(words.shape)}")
    if scale.dtype != "U8" and scale.dtype not in FLOAT_DTYPES:
        raise ModelError(f"{where}: scales of dtype {scale.dtype}, want U8, F16, BF16 or F32")
    if scale.shape[:-1] != words.shape[:-1]:
        raise ModelError(f"{where}: want scales {[*words.shape[:-1], 'groups']}, found {list(scale.shape)}")
    byte_scales = scale.dtype == "U8"
    if not possible_packings(words.shape[-1], scale.shape[-1], byte_scales=byte_scales):
        raise ModelError(
            f"{where}: {words.shape[-1]} words and {scale.shape[-1]} {scale.dtype} scales a row match no quantization"
        )
    if byte_scales and bias is not None:
        raise ModelError(f"{where}: byte scales (a floating-point mode) take no biases, found {bias.key}")
    if not byte_scales and (bias is None or (bias.dtype, bias.shape) != (scale.dtype, scale.shape)):
        found = f"{bias.dtype} {list(bias.shape)}" if bias else "none"
        raise ModelError(f"{where}: want quantization biases {scale.dtype} {list(scale.shape)}, found {found}")
    factor = tensor.global_scale
    counts = {1, words.shape[0]} if len(words.shape) > 2 else {1}
    if factor is not None and (factor.dtype != "F32" or math.prod(factor.shape) not in counts or not byte_scales):
        raise ModelError(f"{where}: want one F32 global scale, found {factor.dtype} {list(factor.shape)}")
