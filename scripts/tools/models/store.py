"""Writes models into an Ollama-style store, as `ollama create` does.

See docs/internals/store.md, 1, 2, 5.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scripts.tools.models.layouts import HEAD, Blob, Layout, import_packed, is_packed, plan
from scripts.tools.models.tensors import (
    PACKINGS,
    Quantization,
    Tensor,
    Writer,
    mlx_style_bytes,
    quantize,
    read_tensors,
    safetensors_bytes,
)

TENSOR = "application/vnd.ollama.image.tensor"
JSON = "application/vnd.ollama.image.json"
CONFIG = "application/vnd.docker.container.image.v1+json"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
LIST = "application/vnd.ollama.manifest.list.v2+json"
_V2_HOSTS = {"registry.ollama.ai": "ollama.com"}


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
        return self.blob(self.layer(name)["digest"])

    def add_blob(self, data: bytes, media_type: str, name: str | None = None) -> dict[str, object]:
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
        self.manifest = {**self.manifest, "layers": [layer for layer in self.layers if layer.get("name") != name]}


def write_tag(
    models_dir: Path, name: str, document: Mapping[str, object], form: Literal["link", "copy", "hard link"] = "link"
) -> Path:
    """Writes a tag as hosts from 0.40 do: a blob of the manifest or list, and a link to it, or a copy where there are
    no links. Returns the tag."""
    store = Store(models_dir, Path())
    blob = store.blob(store.add_blob(json.dumps(document, separators=(",", ":")).encode(), MANIFEST)["digest"])
    host, *rest = manifest_path(models_dir, name).relative_to(models_dir / "manifests").parts
    tag = models_dir.joinpath("manifests-v2", _V2_HOSTS.get(host, host).replace(":", "%3A"), *rest)
    tag.parent.mkdir(parents=True, exist_ok=True)
    tag.unlink(missing_ok=True)
    if form == "link":
        tag.symlink_to(Path("../../../../blobs", blob.name))
    elif form == "hard link":
        tag.hardlink_to(blob)
    else:
        tag.write_bytes(blob.read_bytes())
    return tag


def write_list(
    models_dir: Path, name: str, children: Sequence[tuple[str, Mapping[str, object]]], *, inline: bool = False
) -> Path:
    """Writes a tag that lists manifests, each with its runner. Returns the tag."""
    store = Store(models_dir, Path())
    entries: list[dict[str, object]] = []
    for runner, manifest in children:
        form = {"runner": runner, "format": "safetensors" if runner.strip().lower() == "mlx" else "gguf"}
        if inline:
            entries.append({**manifest, **form})
        else:
            data = json.dumps(manifest, separators=(",", ":")).encode()
            entries.append({"mediaType": MANIFEST, "digest": store.add_blob(data, MANIFEST)["digest"], **form})
    return write_tag(models_dir, name, {"schemaVersion": 2, "mediaType": LIST, "manifests": entries})


def manifest_path(models_dir: Path, name: str) -> Path:
    """`manifests/<host>/<namespace>/<model>/<tag>` for a name in any of its short forms."""
    head, slash, last = name.rpartition("/")
    model, _, tag = last.partition(":")
    parts = (head + slash + model).split("/")
    defaults = ["registry.ollama.ai", "library"]
    return models_dir.joinpath("manifests", *defaults[: 3 - len(parts)], *parts, tag or "latest")


def source_tensors(source_dir: Path) -> dict[str, Tensor]:
    """The tensors of a Hugging Face style directory by name, in alphabetical order."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(source_dir.glob("model*.safetensors")):
        tensors.update(read_tensors(path))
    return dict(sorted(tensors.items()))


def write_store(
    models_dir: Path,
    name: str,
    source_dir: Path,
    quantization: Quantization | None = None,
    *,
    layout: Layout = HEAD,
) -> Store:
    """Writes the Hugging Face style directory `source_dir` into the store at `models_dir` under `name`.

    `layout` decides names, packings and places. A source that is packed already is copied.
    """
    config = json.loads((source_dir / "config.json").read_text())
    tensors = source_tensors(source_dir)
    if is_packed(tensors):
        blobs = list(import_packed(tensors, config, layout))
    else:
        blobs = plan(tensors, config, quantization, layout).blobs
    return write_blobs(models_dir, name, source_dir, blobs, quantization)


def write_blobs(
    models_dir: Path,
    name: str,
    source_dir: Path,
    blobs: Sequence[Blob],
    quantization: Quantization | None = None,
    *,
    writer: Writer = "compact",
    draft: bool = False,
) -> Store:
    """Writes a store like `write_store`, its tensors as they lie in `blobs`.

    Packed blobs come in MLX's file form, the others as bytes of the source (`writer="mlx"`: all in MLX's form). With
    `draft` a speculative model lies beside it.
    """
    store = Store(models_dir, manifest_path(models_dir, name))
    layers = []
    for blob in blobs:
        write = mlx_style_bytes if blob.by_mlx or writer == "mlx" else safetensors_bytes
        layers.append(store.add_blob(write(blob.tensors, blob.metadata), TENSOR, blob.layer))
    layers += [
        store.add_blob(path.read_bytes(), JSON, path.name)
        for path in sorted(source_dir.glob("*.json"))
        if path.name != "model.safetensors.index.json"
    ]
    config_v2: dict[str, object] = {
        "model_format": "safetensors",
        "model_family": "",
        "model_families": None,
        "model_type": "",
        "file_type": quantization or "",
        "requires": "0.19.0",
        "capabilities": ["completion"],
        "architecture": "",
        "os": "",
    }
    if draft:
        layers += _draft_layers(store)
        config_v2["draft"] = _DRAFT
    entry = store.add_blob(json.dumps(config_v2, separators=(",", ":")).encode(), CONFIG)
    store.manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": entry, "layers": layers}
    return store


_DRAFT = {
    "model_format": "safetensors",
    "architecture": "DFlashDraftModel",
    "tensor_prefix": "draft.",
    "config": "draft/config.json",
}


def _draft_layers(store: Store) -> list[dict[str, object]]:
    """A model of its own architecture under `draft.`, some of it packed."""
    matrix = Tensor("F32", (64, 64), bytes(4 * 64 * 64))
    layers = []
    for name in ("draft.fc.weight", "draft.model.layers.0.self_attn.q_proj.weight", "draft.model.norm.weight"):
        layers.append(store.add_blob(safetensors_bytes({name: matrix}), TENSOR, name))
        if name == "draft.fc.weight":
            packed = quantize(matrix, "draft.lm_head.weight", PACKINGS["int8"])
            layers.append(store.add_blob(mlx_style_bytes(packed), TENSOR, "draft.lm_head.weight"))
    config = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 64}
    layers.append(store.add_blob(json.dumps(config).encode(), JSON, "draft/config.json"))
    layers.append(store.add_blob(b"{}", JSON, "draft/tokenizer_config.json"))
    return layers


def add_draft(store: Store, source_dir: Path, quantization: Quantization | None = None) -> None:
    """Puts the model in the Hugging Face style directory `source_dir` beside a stored one, as its draft model."""
    config = json.loads((source_dir / "config.json").read_text())
    for blob in plan(source_tensors(source_dir), config, quantization).blobs:
        tensors = {f"draft.{name}": tensor for name, tensor in blob.tensors.items()}
        store.put_tensors(f"draft.{blob.layer}", tensors, blob.metadata)
    for path in sorted(source_dir.glob("*.json")):
        store.put(f"draft/{path.name}", path.read_bytes())


def write_ancient_store(
    models_dir: Path, name: str, source_dir: Path, quantization: Quantization | None = None
) -> Store:
    """Writes what releases before 0.16 wrote: one blob per array, called `data` inside, its companions layers of their
    own."""
    store = write_store(models_dir, name, source_dir, quantization)
    layers = []
    for layer in store.layers:
        if layer["mediaType"] != TENSOR:
            layers.append(layer)
            continue
        for key, tensor in store.tensors(str(layer["name"])).items():
            used = key.replace(".weight.scale", ".weight_scale").replace(".weight.bias", ".weight_qbias")
            layers.append(store.add_blob(safetensors_bytes({"data": tensor}), TENSOR, used))
    store.manifest = {**store.manifest, "layers": layers}
    return store
