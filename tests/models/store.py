"""Writes models into an Ollama-style store, the way `ollama create --experimental` does (store.md, sections 1, 2, 5).

It shares no code with `runner.model`: a loader tested against its own idea of the format would prove nothing.
"""

import hashlib
import io
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

TENSOR = "application/vnd.ollama.image.tensor"
JSON = "application/vnd.ollama.image.json"
CONFIG = "application/vnd.docker.container.image.v1+json"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"

Quantization = Literal["int4", "int8", "nvfp4", "mxfp4", "mxfp8"]
Writer = Literal["compact", "mlx"]


class Packing(NamedTuple):
    """What `mx.quantize` is asked for."""

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
_EIGHT_BIT = {"int4": "int8", "int8": "int8", "nvfp4": "mxfp8", "mxfp4": "mxfp8", "mxfp8": "mxfp8"}
_NEVER_QUANTIZED = (
    *("embed", "norm", "ln_", "audio_tower", "vision", "visual"),
    *("mlp.gate.", "mixer.gate.", "shared_expert_gate", "router.proj"),
)
_COMPANIONS = ("", ".scale", ".bias")
_PROMOTED = ("v_proj", "k_proj", "down_proj")


class Tensor(NamedTuple):
    """One array as it lies in a safetensors file: `dtype` in the file's spelling, `data` its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def parse_tensors(raw: bytes) -> dict[str, Tensor]:
    """The arrays of one safetensors file."""
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            data = raw[8 + length + start : 8 + length + stop]
            tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), data)
    return tensors


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The arrays of the safetensors file at `path`, copied out."""
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
    import mlx.core as mx

    arrays = mx.load(io.BytesIO(safetensors_bytes(tensors)), format="safetensors")
    assert isinstance(arrays, dict)
    file = io.BytesIO()
    mx.save_safetensors(file, arrays, dict(metadata) if metadata else None)
    return file.getvalue()


def quantization_of(name: str, shape: tuple[int, ...], wanted: Quantization) -> Quantization | None:
    """The type that Ollama's generic policy gives one tensor of a model quantized to `wanted`; None leaves it dense."""
    if not name.endswith(".weight") or len(shape) != 2 or math.prod(shape) < 1024:
        return None
    if any(part in name for part in _NEVER_QUANTIZED):
        return None
    chosen: str = wanted
    promoted = wanted in ("int4", "nvfp4", "mxfp4") and any(part in name for part in _PROMOTED)
    if "lm_head" in name or promoted:
        chosen = _EIGHT_BIT[wanted]
    if shape[-1] % PACKINGS[chosen].group_size:
        return None
    return chosen  # type: ignore[return-value]  # a key of PACKINGS


def quantize(tensor: Tensor, name: str, packing: Packing) -> dict[str, Tensor]:
    """The packed words, scales and (affine) biases of one tensor under the store's key names."""
    import mlx.core as mx

    arrays = mx.load(io.BytesIO(safetensors_bytes({name: tensor})), format="safetensors")
    assert isinstance(arrays, dict)
    parts = mx.quantize(arrays[name], packing.group_size, packing.bits, mode=packing.mode)
    file = io.BytesIO()
    mx.save_safetensors(file, {name + suffix: part for suffix, part in zip(_COMPANIONS, parts, strict=False)})
    return parse_tensors(file.getvalue())


@dataclass
class Store:
    """A written model, for tests that break it: layers are found by their `name`."""

    models_dir: Path
    manifest_path: Path

    @property
    def manifest(self) -> dict[str, object]:
        return dict(json.loads(self.manifest_path.read_text()))

    @manifest.setter
    def manifest(self, value: Mapping[str, object]) -> None:
        self.manifest_path.parent.mkdir(parents=True, exist_ok=True)
        self.manifest_path.write_text(json.dumps(value, separators=(",", ":")) + "\n")

    @property
    def layers(self) -> list[dict[str, object]]:
        layers = self.manifest["layers"]
        assert isinstance(layers, list)
        return layers

    def layer(self, name: str) -> dict[str, object]:
        return next(layer for layer in self.layers if layer.get("name") == name)

    def blob(self, digest: object) -> Path:
        return self.models_dir / "blobs" / str(digest).replace(":", "-")

    def blob_of(self, name: str) -> Path:
        """The file behind the layer called `name`."""
        return self.blob(self.layer(name)["digest"])

    def add_blob(self, data: bytes, media_type: str, name: str | None = None) -> dict[str, object]:
        """Writes one blob and returns its manifest entry."""
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        path = self.blob(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        entry: dict[str, object] = {"mediaType": media_type, "digest": digest, "size": len(data)}
        if name is not None:
            entry["name"] = name
        return entry

    def put(self, name: str, data: bytes, media_type: str = JSON) -> None:
        """Replaces the layer called `name`, or adds it at the end."""
        entry = self.add_blob(data, media_type, name)
        layers = self.layers
        for index, layer in enumerate(layers):
            if layer.get("name") == name:
                layers[index] = entry
                break
        else:
            layers.append(entry)
        self.manifest = {**self.manifest, "layers": layers}

    def put_json(self, name: str, value: object) -> None:
        self.put(name, json.dumps(value).encode())

    def put_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Replaces or adds the tensor layer called `name` by a well-formed file holding `tensors`."""
        self.put(name, safetensors_bytes(tensors, metadata), TENSOR)

    def tensors(self, name: str) -> dict[str, Tensor]:
        return read_tensors(self.blob_of(name))

    def drop(self, name: str) -> None:
        """Takes the layer out of the manifest; the blob stays."""
        self.manifest = {**self.manifest, "layers": [layer for layer in self.layers if layer.get("name") != name]}


def manifest_path(models_dir: Path, name: str) -> Path:
    """`manifests/<host>/<namespace>/<model>/<tag>` for a name in any of its short forms."""
    head, slash, last = name.rpartition("/")
    model, _, tag = last.partition(":")
    parts = (head + slash + model).split("/")
    defaults = ["registry.ollama.ai", "library"]
    return models_dir.joinpath("manifests", *defaults[: 3 - len(parts)], *parts, tag or "latest")


def _source_tensors(source_dir: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(source_dir.glob("model*.safetensors")):
        tensors.update(read_tensors(path))
    return dict(sorted(tensors.items()))


def _declared_type(config: Mapping[str, object]) -> str | None:
    """The `quant_type` that an import of an MLX-quantized checkpoint writes into every blob, right or wrong."""
    declared = config.get("quantization")
    if not isinstance(declared, dict) or "mode" not in declared:
        return None
    if declared["mode"] == "affine":
        return {4: "int4", 8: "int8"}.get(declared["bits"])
    return str(declared["mode"])


def _blobs(
    tensors: Mapping[str, Tensor], quantization: Quantization | None, config: Mapping[str, object]
) -> Iterator[tuple[str, dict[str, Tensor], dict[str, str], bool]]:
    """Per blob: layer name, arrays, metadata, and whether MLX would have written it."""
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")) and f"{name.rpartition('.')[0]}.scales" in tensors:
            continue
        if name.endswith(".weight") and f"{stem}.scales" in tensors:
            arrays = {name: tensor, f"{name}.scale": tensors[f"{stem}.scales"]}
            if f"{stem}.biases" in tensors:
                arrays[f"{name}.bias"] = tensors[f"{stem}.biases"]
            declared = _declared_type(config)
            group = str(config["quantization"]["group_size"]) if declared else ""  # type: ignore[index]  # a dict, then
            yield name, arrays, {"quant_type": declared, "group_size": group} if declared else {}, False
            continue
        chosen = quantization_of(name, tensor.shape, quantization) if quantization else None
        if chosen:
            packing = PACKINGS[chosen]
            metadata = {"quant_type": chosen, "group_size": str(packing.group_size)}
            yield name, quantize(tensor, name, packing), metadata, True
        else:
            yield name, {name: tensor}, {}, False


def write_store(
    models_dir: Path,
    name: str,
    source_dir: Path,
    quantization: Quantization | None = None,
    *,
    writer: Writer = "compact",
    model_format: str = "safetensors",
) -> Store:
    """Writes the Hugging Face style directory `source_dir` into the store at `models_dir` under `name`.

    One blob per logical tensor; quantized ones by Ollama's generic policy and in MLX's file form, the others as bytes
    of the source (`writer="mlx"`: all in MLX's form). A source that is MLX-quantized already (`.scales`) is copied with
    the metadata that Ollama's import would give it. Per-expert tensors are not stacked.
    """
    store = Store(models_dir, manifest_path(models_dir, name))
    config = json.loads((source_dir / "config.json").read_text())
    layers = []
    for layer, arrays, metadata, by_mlx in _blobs(_source_tensors(source_dir), quantization, config):
        write = mlx_style_bytes if by_mlx or writer == "mlx" else safetensors_bytes
        layers.append(store.add_blob(write(arrays, metadata), TENSOR, layer))
    layers += [
        store.add_blob(path.read_bytes(), JSON, path.name)
        for path in sorted(source_dir.glob("*.json"))
        if path.name != "model.safetensors.index.json"
    ]
    config_v2 = {
        "model_format": model_format,
        "model_family": "",
        "model_families": None,
        "model_type": "",
        "file_type": quantization or "",
        "requires": "0.19.0",
        "capabilities": ["completion"],
        "architecture": "",
        "os": "",
    }
    entry = store.add_blob(json.dumps(config_v2, separators=(",", ":")).encode(), CONFIG)
    store.manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": entry, "layers": layers}
    return store
