"""Tensors as bytes of safetensors files, written the two ways Ollama writes them, and packed as MLX packs them.

It shares no code with `runner.model`: a loader tested against its own idea of the format would prove nothing.
"""

import io
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import mlx.core as mx

Quantization = Literal["int4", "int8", "nvfp4", "mxfp4", "mxfp8"]
Writer = Literal["compact", "mlx"]


class Packing(NamedTuple):
    """The arguments of `mx.quantize`."""

    group_size: int
    bits: int
    mode: str


PACKINGS: dict[str, Packing] = {
    "int4": Packing(64, 4, "affine"),
    "int8": Packing(64, 8, "affine"),
    "nvfp4": Packing(16, 4, "nvfp4"),
    "mxfp4": Packing(32, 4, "mxfp4"),
    "mxfp8": Packing(32, 8, "mxfp8"),
}
COMPANIONS = ("", ".scale", ".bias")
"""Suffixes of the parts of a packed tensor, in the order in which `mx.quantize` returns them."""


class Tensor(NamedTuple):
    """One array as it lies in a safetensors file: `dtype` in the file's spelling, `data` its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def parse_tensors(raw: bytes) -> dict[str, Tensor]:
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            data = raw[8 + length + start : 8 + length + stop]
            tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), data)
    return tensors


def parse_metadata(raw: bytes) -> dict[str, str]:
    """The `__metadata__` of one safetensors file; empty if there is none."""
    (length,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + length]).get("__metadata__") or {}


def read_tensors(path: Path) -> dict[str, Tensor]:
    return parse_tensors(path.read_bytes())


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A file as Ollama's byte-copy writer makes it: compact JSON, padded to 8 bytes, no empty metadata."""
    header: dict[str, object] = {}
    if metadata:
        header["__metadata__"] = dict(metadata)
    offset = 0
    for name, tensor in tensors.items():
        stop = offset + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(tensor.data for tensor in tensors.values())


def mlx_style_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A file as MLX's writer makes it: sorted keys, no padding (data unaligned), `null` for no metadata."""
    return _saved(to_mlx(tensors), metadata)


def to_mlx(tensors: Mapping[str, Tensor]) -> dict[str, mx.array]:
    arrays = mx.load(io.BytesIO(safetensors_bytes(tensors)), format="safetensors")
    assert isinstance(arrays, dict)
    return arrays


def from_mlx(arrays: Mapping[str, mx.array]) -> dict[str, Tensor]:
    return parse_tensors(_saved(arrays))


def _saved(arrays: Mapping[str, mx.array], metadata: Mapping[str, str] | None = None) -> bytes:
    file = io.BytesIO()
    mx.save_safetensors(file, dict(arrays), dict(metadata) if metadata else None)
    return file.getvalue()


def changed(tensor: Tensor, change: Callable[[mx.array], mx.array]) -> Tensor:
    return from_mlx({"x": mx.contiguous(change(to_mlx({"x": tensor})["x"]))})["x"]


def stacked(tensors: list[Tensor]) -> Tensor:
    first = tensors[0]
    assert all(tensor[:2] == first[:2] for tensor in tensors)
    return Tensor(first.dtype, (len(tensors), *first.shape), b"".join(tensor.data for tensor in tensors))


def unstacked(tensor: Tensor) -> list[Tensor]:
    count, *shape = tensor.shape
    size = len(tensor.data) // count
    return [Tensor(tensor.dtype, tuple(shape), tensor.data[index * size :][:size]) for index in range(count)]


def quantize(tensor: Tensor, name: str, packing: Packing) -> dict[str, Tensor]:
    """The packed words, scales and (affine) biases of one tensor under the store's key names."""
    parts = mx.quantize(to_mlx({name: tensor})[name], packing.group_size, packing.bits, mode=packing.mode)
    return from_mlx({name + suffix: part for suffix, part in zip(COMPANIONS, parts, strict=False)})


def rounded(array: mx.array, packing: Packing) -> mx.array:
    """The numbers that are left of `array` when it has been packed, in its own type."""
    words, scales, *biases = mx.quantize(array, packing.group_size, packing.bits, mode=packing.mode)
    return mx.dequantize(
        words, scales, biases[0] if biases else None, packing.group_size, packing.bits, packing.mode, dtype=array.dtype
    )
