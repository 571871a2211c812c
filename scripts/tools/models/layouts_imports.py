"""The layouts that `ollama create` gives checkpoints packed by others: MLX's own, ModelOpt's, compressed-tensors'.

Nothing is packed again, and today nothing stacked; one blob per weight, its companions renamed
(docs/internals/store.md, 2.4, 2.5, 5).
"""

import re
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from scripts.tools.models.layouts import HEAD, Blob, Layout
from scripts.tools.models.layouts_policy import Config
from scripts.tools.models.tensors import Tensor, stacked


class _Producer(NamedTuple):
    """Names that follow a module's path. `inverted` tells whether the global scale divides."""

    weight: str
    scale: str
    bias: str = ""
    global_scale: str = ""
    inverted: bool = False
    metadata: Mapping[str, str] = {}


_MLX = _Producer(".weight", ".scales", ".biases")
_COMPRESSED = _Producer(
    ".weight_packed",
    ".weight_scale",
    global_scale=".weight_global_scale",
    inverted=True,
    metadata={"quant_type": "nvfp4", "group_size": "16"},
)
_PRODUCERS = (
    _MLX,
    _COMPRESSED,
    _Producer(".weight", ".weight_scale", global_scale=".weight_scale_2", metadata={"quant_type": "nvfp4"}),
)
_ACTIVATIONS = (".input_scale", ".input_global_scale")


def is_packed(tensors: Mapping[str, Tensor]) -> bool:
    """Returns True if a checkpoint is copied rather than packed."""
    return any(_found(name, tensors) for name in tensors)


def import_packed(tensors: Mapping[str, Tensor], config: Config, layout: Layout = HEAD) -> Iterator[Blob]:
    """The blobs of a checkpoint that is packed already."""
    blobs = _copied(tensors, config)
    yield from _stacked_groups(blobs) if layout.experts == "renamed" else blobs


def _copied(tensors: Mapping[str, Tensor], config: Config) -> Iterator[Blob]:
    consumed: set[str] = set()
    weights: dict[str, Blob] = {}
    for name in tensors:
        found = _found(name, tensors)
        if found is None:
            continue
        producer, stem = found
        companions = [stem + part for part in (producer.scale, producer.bias, producer.global_scale) if part]
        consumed |= {*companions, *(stem + part for part in _ACTIVATIONS)}
        arrays = {f"{stem}.weight": _words(tensors[name]), f"{stem}.weight.scale": _bytes(tensors[companions[0]])}
        if producer.bias and stem + producer.bias in tensors:
            arrays[f"{stem}.weight.bias"] = tensors[stem + producer.bias]
        if producer.global_scale and stem + producer.global_scale in tensors:
            factor = tensors[stem + producer.global_scale]
            arrays[f"{stem}.weight.global_scale"] = _inverse(factor) if producer.inverted else factor
        metadata = {**producer.metadata} if producer is not _MLX else _declared(config)
        weights[name] = Blob(f"{stem}.weight", arrays, metadata)
    for name, tensor in tensors.items():
        if name in weights:
            yield weights[name]
        elif name not in consumed:
            yield Blob(name, {name: tensor})


_EXPERT = re.compile(r"((?:.+\.)?layers\.\d+\.(?:mlp|moe))\.experts\.(\d+)\.(\w+)\.weight")


def _stacked_groups(blobs: Iterator[Blob]) -> Iterator[Blob]:
    """From 0.20.8 to 0.30 the experts of compressed-tensors were stacked, their global scales to [E, 1, 1]."""
    groups: dict[str, dict[str, dict[int, Blob]]] = {}
    for blob in blobs:
        match = _EXPERT.fullmatch(blob.layer)
        if match and blob.metadata == _COMPRESSED.metadata:
            groups.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = blob
        else:
            yield blob
    for head, projections in groups.items():
        arrays: dict[str, Tensor] = {}
        metadata = dict(_COMPRESSED.metadata)
        for projection, experts in sorted(projections.items()):
            name = f"{head}.switch_mlp.{projection}.weight"
            for suffix in ("", ".scale", ".global_scale"):
                parts = [experts[index].tensors[f"{experts[index].layer}{suffix}"] for index in range(len(experts))]
                whole = stacked([part._replace(shape=(1, 1)) if suffix == ".global_scale" else part for part in parts])
                arrays[name + suffix] = whole
            metadata |= {f"{name}.{key}": value for key, value in _COMPRESSED.metadata.items()}
        yield Blob(f"{head}.experts", arrays, metadata)


def _found(name: str, tensors: Mapping[str, Tensor]) -> tuple[_Producer, str] | None:
    for producer in _PRODUCERS:
        stem = name.removesuffix(producer.weight)
        if stem != name and stem + producer.scale in tensors:
            return producer, stem
    return None


def _declared(config: Config) -> dict[str, str]:
    """Returns the config's settings for the whole model, right or wrong for this tensor; none without a mode."""
    said = config.get("quantization")
    if not isinstance(said, Mapping) or "mode" not in said:
        return {}
    kind = {4: "int4", 8: "int8"}.get(said["bits"]) if said["mode"] == "affine" else str(said["mode"])
    return {"quant_type": kind, "group_size": str(said["group_size"])} if kind else {}


def _words(tensor: Tensor) -> Tensor:
    """Two values a byte are eight values a word."""
    if tensor.dtype != "U8":
        return tensor
    return Tensor("U32", (*tensor.shape[:-1], tensor.shape[-1] // 4), tensor.data)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor._replace(dtype="U8") if tensor.dtype == "F8_E4M3" else tensor


def _inverse(tensor: Tensor) -> Tensor:
    (value,) = struct.unpack("<f", tensor.data)
    return tensor._replace(data=struct.pack("<f", 1 / value))
