"""Unpacks FP8 weights, and repacks AutoAWQ's 4-bit weights for MLX.

An FP8 tensor `x.weight` holds bytes. `x.weight_scale_inv` holds a scale for the tensor, for each expert or for each
square block. A few of mlx-lm's modules unpack some of these forms; one module reads the bytes as plain numbers. AutoAWQ
(`WQLinear_GEMM`) has the same numbers as MLX in another order.
"""

import mlx.core as mx

from runner.errors import ModelError
from runner.model.architectures import Config
from runner.model.weights.experts import Weights

_SCALE = "_scale_inv"
_ACTIVATIONS = ("activation_scale", "input_scale")
"""The scales of an FP8 layer's input. They are dropped, because inputs are not quantized here."""
_USUAL_BLOCK = 128


def fp8_block(config: Config) -> int:
    """Returns the side of a square block of FP8 weights."""
    said = config.get("quantization_config")
    block = said.get("weight_block_size") if isinstance(said, dict) else None
    first = block[0] if isinstance(block, list) and block else None
    return first if type(first) is int and first > 0 else _USUAL_BLOCK


def from_fp8(weights: Weights, block: int) -> Weights:
    """Returns `weights` with lazy bfloat16 arrays in place of FP8 bytes and scales. `block` is the side of a block."""
    plain = dict(weights)
    for name in [name for name in weights if name.endswith(_SCALE)]:
        path = name.removesuffix(_SCALE)
        scales, words = weights[name], weights.get(path)
        if words is None or words.dtype != mx.uint8 or words.ndim < 2 or not mx.issubdtype(scales.dtype, mx.floating):
            continue
        rows, columns = words.shape[-2:]
        if [*scales.shape[-2:]] == [-(-rows // block), -(-columns // block)]:
            scales = mx.repeat(mx.repeat(scales, block, -2), block, -1)[..., :rows, :columns]
        plain[path] = (mx.from_fp8(words, mx.float32) * scales).astype(mx.bfloat16)
        for key in (name, *(f"{path.removesuffix('weight')}{each}" for each in _ACTIVATIONS)):
            plain.pop(key, None)
    return plain


_AWQ_BITS = 4
_AWQ_WORD = 32 // _AWQ_BITS
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""At n: the nibble of a word that holds the word's n-th value."""


def from_awq(weights: Weights) -> Weights:
    """Returns `weights` with every `x.qweight`, `x.qzeros`, `x.scales` replaced by lazy `x.weight`, `x.scales`,
    `x.biases`.

    AWQ stores a layer as [in, out/8] with scales [in/group, out]; MLX stores [out, in/8] with scales [out, in/group]. A
    value is `(q - zero) * scale` in AWQ and `q * scale + bias` in MLX. Other floating-point arrays get the type of the
    scales, as in mlx-lm.
    """
    stems = [name.removesuffix(".qweight") for name in weights if name.endswith(".qweight")]
    dtype = weights[f"{stems[0]}.scales"].dtype if f"{stems[0]}.scales" in weights else mx.float16
    converted = {
        name: array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
        for name, array in weights.items()
        if name.rpartition(".")[0] not in stems or name.endswith(".bias")
    }
    for stem in stems:
        parts = [weights.get(f"{stem}.{part}") for part in ("qweight", "scales", "qzeros")]
        words, scales, zeros = parts
        integers = [part for part in (words, zeros) if part is not None]
        odd = any(part.ndim != 2 or part.dtype not in (mx.int32, mx.uint32) for part in integers)
        if f"{stem}.g_idx" in weights or words is None or scales is None or scales.ndim != 2 or odd:
            raise ModelError(f"tensor {stem}.qweight: not a 4-bit AWQ layer; convert the model with mlx_lm.convert")
        in_dims, out_dims = words.shape[0], words.shape[1] * _AWQ_WORD
        fits = zeros is None or zeros.shape == (scales.shape[0], words.shape[1])
        if scales.shape[1] != out_dims or in_dims % _AWQ_WORD or not fits:
            raise ModelError(f"tensor {stem}.qweight {list(words.shape)} does not fit scales {list(scales.shape)}")
        values = _nibbles(words).T.reshape(out_dims, in_dims // _AWQ_WORD, _AWQ_WORD).astype(mx.uint32)
        shifts = mx.arange(_AWQ_WORD, dtype=mx.uint32) * _AWQ_BITS
        converted[f"{stem}.weight"] = (values << shifts).sum(axis=-1).astype(mx.uint32)
        converted[f"{stem}.scales"] = columns = mx.contiguous(scales.T)
        offset = mx.array(1 << (_AWQ_BITS - 1)) if zeros is None else _nibbles(zeros).T
        converted[f"{stem}.biases"] = (-offset.astype(mx.float32) * columns).astype(dtype)
    return converted


def _nibbles(words: mx.array) -> mx.array:
    """Unpacks [rows, n/8] words into [rows, n] values 0..15."""
    nibbles = words[..., None] >> (mx.array(_AWQ_ORDER) * _AWQ_BITS) & 0xF
    return nibbles.reshape(words.shape[0], -1)
