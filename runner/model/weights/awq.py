"""Repacks AutoAWQ's 4-bit checkpoints for MLX: the same numbers in other places (AutoAWQ's `WQLinear_GEMM`)."""

import mlx.core as mx

from runner.errors import ModelError

_BITS = 4
_PER_WORD = 32 // _BITS
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds its n-th value."""


def is_awq(weights: dict[str, mx.array]) -> bool:
    return any(name.endswith(".qweight") for name in weights)


def to_mlx(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Converts every `x.qweight`, `x.qzeros`, `x.scales` into `x.weight`, `x.scales`, `x.biases`; lazily.

    AWQ stores a layer as [in, out/8] with scales [in/group, out], MLX as [out, in/8] with [out, in/group]. A value is
    `(q - zero) * scale` in AWQ and `q * scale + bias` in MLX. Other floats get the type of the scales, as in mlx-lm.
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
        in_dims, out_dims = words.shape[0], words.shape[1] * _PER_WORD
        fits = zeros is None or zeros.shape == (scales.shape[0], words.shape[1])
        if scales.shape[1] != out_dims or in_dims % _PER_WORD or not fits:
            raise ModelError(f"tensor {stem}.qweight {list(words.shape)} does not fit scales {list(scales.shape)}")
        values = _unpacked(words).T.reshape(out_dims, in_dims // _PER_WORD, _PER_WORD).astype(mx.uint32)
        shifts = mx.arange(_PER_WORD, dtype=mx.uint32) * _BITS
        converted[f"{stem}.weight"] = (values << shifts).sum(axis=-1).astype(mx.uint32)
        converted[f"{stem}.scales"] = columns = mx.contiguous(scales.T)
        offset = mx.array(1 << (_BITS - 1)) if zeros is None else _unpacked(zeros).T
        converted[f"{stem}.biases"] = (-offset.astype(mx.float32) * columns).astype(dtype)
    return converted


def _unpacked(words: mx.array) -> mx.array:
    """Unpacks [rows, n/8] words into [rows, n] values 0..15."""
    nibbles = words[..., None] >> (mx.array(_ORDER) * _BITS) & 0xF
    return nibbles.reshape(words.shape[0], -1)
