"""Ollama's store: a manifest names blobs, one blob holds one logical tensor or one JSON file (store.md, 1 and 2)."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from runner.errors import ModelError
from runner.model.checkpoint import Checkpoint, File, Tensor, merge
from runner.model.header import Entry, read_header, reason
from runner.model.name import find_manifest, manifest_path, parse_name

_TENSOR = "application/vnd.ollama.image.tensor"
_JSON = "application/vnd.ollama.image.json"
_MODEL_FORMAT = "safetensors"
_DIGEST = re.compile(r"sha256[:-][0-9a-fA-F]{64}")
_DRAFT = ("draft.", "draft/")
"""How everything of a speculative draft model is named; nothing here runs one."""
_ADVICE = "`ollama list` names the models that are there, --models-dir another store"
_COMPANIONS = (".scale", ".bias", ".global_scale")


class _Layer(NamedTuple):
    media_type: str
    name: str
    blob: Path
    size_bytes: int


def open_store(name: str, models_dir: Path) -> Checkpoint:
    """Reads the manifest of `name` and the header of every tensor blob that can matter.

    Raises ModelError: a missing manifest in Go's words, anything else with the path and what is wrong there.
    """
    parsed = parse_name(name)
    path = find_manifest(models_dir, parsed)
    if path is None:
        where = manifest_path(models_dir, parsed)
        raise ModelError(f"read manifest: open {where}: no such file or directory ({_ADVICE})")
    manifest = _read_manifest(path)
    layers = [_layer(path, item, models_dir) for item in _layers(path, manifest)]
    _check_format(name, path, manifest, models_dir)
    blobs = {layer.blob: layer for layer in layers if layer.media_type == _TENSOR and not layer.name.startswith(_DRAFT)}
    if not blobs:
        raise ModelError(f"model {name} has no tensor layers (a GGUF model?): {path}")
    files: dict[str, File] = {}
    for layer in layers:
        if layer.media_type == _JSON:
            files.setdefault(layer.name, File(layer.blob, layer.size_bytes))
    return Checkpoint(
        name=name,
        files=files,
        tensors=merge(_tensors(layer) for layer in blobs.values()),
        from_store=True,
        missing_file='config "{}" not found in manifest',
    )


def _read_manifest(path: Path) -> Mapping[str, object]:
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"read manifest: open {path}: {reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"parse manifest: {path}: {error}") from error
    if not isinstance(manifest, dict):
        raise ModelError(f"parse manifest: {path}: want a JSON object, found {type(manifest).__name__}")
    return manifest


def _layers(path: Path, manifest: Mapping[str, object]) -> list[object]:
    layers = manifest.get("layers")
    if not isinstance(layers, list):
        raise ModelError(f"parse manifest: {path}: want a list of layers, found {layers!r}")
    return layers


def _layer(path: Path, item: object, models_dir: Path) -> _Layer:
    """One entry of the manifest. The digest is checked before it becomes part of a path."""
    if not isinstance(item, dict):
        raise ModelError(f"parse manifest: {path}: a layer is not an object: {item!r}")
    media_type, name, digest, size = (item.get(key) for key in ("mediaType", "name", "digest", "size"))
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ModelError(f"parse manifest: {path}: invalid digest {digest!r} of layer {name or media_type!r}")
    if type(size) is not int or size < 0:
        raise ModelError(f"parse manifest: {path}: invalid size {size!r} of layer {name or media_type!r}")
    blob = models_dir / "blobs" / digest.replace(":", "-")
    return _Layer(media_type if isinstance(media_type, str) else "", name if isinstance(name, str) else "", blob, size)


def _check_format(name: str, path: Path, manifest: Mapping[str, object], models_dir: Path) -> None:
    """Refuses what the config blob, if there is one, says is no safetensors model."""
    item = manifest.get("config")
    if item is None:
        return
    layer = _layer(path, item, models_dir)
    try:
        config = json.loads(File(layer.blob, layer.size_bytes).read())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"model config {layer.blob}: {error}") from error
    found = config.get("model_format") if isinstance(config, dict) else None
    if found != _MODEL_FORMAT:
        raise ModelError(f"model {name} has the format {found!r}, want {_MODEL_FORMAT!r}: {layer.blob}")


def _tensors(layer: _Layer) -> Iterator[Tensor]:
    """The logical tensors of one blob, found by the names inside it; the layer's own name serves messages only."""
    try:
        entries = read_header(layer.blob, size_bytes=layer.size_bytes)
    except ModelError as error:
        raise ModelError(f"layer {layer.name}: {error}") from error
    if "data" in entries:
        raise ModelError(f"layer {layer.name}: {layer.blob}: layout of before Ollama 0.16; create or pull it again")
    for key, entry in entries.items():
        if key.startswith(_DRAFT) or _is_companion(key, entries):
            continue
        if f"{key}.scale" in entries:
            yield Tensor(key, entry, *(entries.get(key + suffix) for suffix in _COMPANIONS))
        else:
            yield Tensor(key, entry)


def _is_companion(key: str, entries: Mapping[str, Entry]) -> bool:
    """Whether `key` serves another key of its file. `router.scale` does not: there is no `router`."""
    base, dot, last = key.rpartition(".")
    return dot + last in _COMPANIONS and base in entries and f"{base}.scale" in entries
