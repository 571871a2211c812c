"""Opens a model in Ollama's store: a manifest that lists blobs. A blob holds tensors or a JSON file.

See docs/internals/store.md, 1 and 2.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from runner.errors import ModelError
from runner.model.sources.checkpoint import (
    File,
    LogicalTensor,
    ModelCheckpoint,
    ReportFault,
    merge_tensors,
    placeholder_tensor,
    raise_fault,
)
from runner.model.sources.manifest import (
    BLOBS,
    DIGEST,
    find_manifest,
    missing_manifest_error,
    parse_object,
    read_manifest,
)
from runner.model.sources.name import parse_model_name
from runner.model.sources.safetensors import HeaderEntry, read_tensor_header

_TENSOR = "application/vnd.ollama.image.tensor"
_TOKENIZER_FOLDER = "tokenizer/"
_JSON = "application/vnd.ollama.image.json"
_MODEL_FORMAT = "safetensors"
_DRAFT = ("draft.", "draft/")
"""The prefixes of the names of tensors, and of files, that belong to a draft model stored with a model."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
_COMPANIONS = (".scale", ".bias", ".global_scale")


class _Layer(NamedTuple):
    media_type: str
    name: str
    blob: Path
    size_bytes: int

    @property
    def file(self) -> File:
        return File(self.blob, self.size_bytes)

    @property
    def is_draft(self) -> bool:
        return self.name.startswith(_DRAFT)


def open_store(name: str, models_dir: Path, report: ReportFault = raise_fault) -> ModelCheckpoint:
    """Opens the model `name`: reads its manifest and the headers of its tensor blobs, except a draft model's blobs.

    Raises ModelError: with Go's message for a missing manifest, otherwise with the path and the fault. Passes the fault
    of a single layer to `report`; the layer's tensors become `unreadable`.
    """
    parsed = parse_model_name(name)
    found = find_manifest(models_dir, parsed)
    if found is None:
        raise missing_manifest_error(models_dir, parsed)
    path, manifest, children = read_manifest(models_dir, found)
    config = _config_blob(name, path, manifest, models_dir, report)
    unreadable: dict[str, LogicalTensor] = {}
    layers = [*_layers(path, manifest, models_dir, unreadable, report)]
    tensor_layers = [layer for layer in layers if layer.media_type == _TENSOR]
    blobs = {layer.blob: layer for layer in tensor_layers if not layer.is_draft}
    if not blobs and not unreadable:
        raise ModelError(f"model {name} has no tensor layers (a GGUF model, which stays with Ollama?): {path}")
    files: dict[str, File] = {}
    for layer in layers:
        if layer.media_type == _JSON:
            files.setdefault(layer.name, layer.file)
    for key, file in [*files.items()]:
        files.setdefault(key.removeprefix(_TOKENIZER_FOLDER), file)  # models that decide have their tokenizer there
    return ModelCheckpoint(
        name=name,
        path=path,
        files=files,
        tensors=merge_tensors((_tensors(layer, unreadable, report) for layer in blobs.values()), report),
        from_store=True,
        missing_file='config "{}" not found in manifest',
        unreadable=unreadable,
        manifest=manifest,
        children=children,
        draft_bytes={layer.name: layer.size_bytes for layer in tensor_layers if layer.is_draft},
        text_blobs={**config, **{key: file for key, file in files.items() if not key.startswith(_DRAFT)}},
    )


def open_stored_draft(target: ModelCheckpoint, models_dir: Path) -> ModelCheckpoint:
    """Opens the draft model that the store keeps with the model `target`. Without a tokenizer of its own, the draft
    model gets the tokenizer of `target`. Raises ModelError."""
    layers = [layer for layer in _layers(target.path, target.manifest, models_dir, {}, raise_fault) if layer.is_draft]
    tensors, files = _DRAFT
    blobs = {layer.blob: layer for layer in layers if layer.media_type == _TENSOR}
    found = {layer.name.removeprefix(files): layer.file for layer in layers if layer.media_type == _JSON}
    if found.keys().isdisjoint(TOKENIZERS):
        found |= {name: file for name, file in target.files.items() if name in TOKENIZERS}
    return ModelCheckpoint(
        name=f"the draft of {target.name}",
        path=target.path,
        files=found,
        tensors=merge_tensors(_tensors(layer, {}, raise_fault, prefix=tensors) for layer in blobs.values()),
        from_store=True,
        missing_file='config "draft/{}" not found in manifest',
    )


def _layers(
    path: Path,
    manifest: Mapping[str, object],
    models_dir: Path,
    unreadable: dict[str, LogicalTensor],
    report: ReportFault,
) -> Iterator[_Layer]:
    layers = manifest.get("layers")
    if not isinstance(layers, list):
        raise ModelError(f"parse manifest: {path}: want a list of layers, found {layers!r}")
    for item in layers:
        try:
            yield _layer(path, item, models_dir)
        except ModelError as error:
            if not isinstance(item, dict) or item.get("mediaType") != _TENSOR:
                raise
            report(error)
            name = str(item.get("name"))
            unreadable[name] = placeholder_tensor(name, path)


def _layer(path: Path, item: object, models_dir: Path) -> _Layer:
    """Returns the layer of one manifest entry. Raises ModelError for a bad entry. The digest is checked before it
    becomes part of a path."""
    if not isinstance(item, dict):
        raise ModelError(f"parse manifest: {path}: a layer is not an object: {item!r}")
    media_type, name, digest, size = (item.get(key) for key in ("mediaType", "name", "digest", "size"))
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise ModelError(f"parse manifest: {path}: invalid digest {digest!r} of layer {name or media_type!r}")
    if type(size) is not int or size < 0:
        raise ModelError(f"parse manifest: {path}: invalid size {size!r} of layer {name or media_type!r}")
    blob = models_dir / BLOBS / digest.replace(":", "-")
    return _Layer(media_type if isinstance(media_type, str) else "", name if isinstance(name, str) else "", blob, size)


def _config_blob(
    name: str, path: Path, manifest: Mapping[str, object], models_dir: Path, report: ReportFault
) -> dict[str, File]:
    """Returns the file in which Ollama describes the model, by its name in messages; {} if there is none. Raises
    ModelError if the model's format is not safetensors."""
    item = manifest.get("config")
    if item is None:
        return {}
    try:
        layer = _layer(path, item, models_dir)
        config = _parsed(layer)
    except ModelError as error:
        report(error)
        return {}
    if config.get("model_format") != _MODEL_FORMAT:
        raise ModelError(
            f"model {name} has the format {config.get('model_format')!r}, want {_MODEL_FORMAT!r}"
            f" (`ollama create` makes such models; GGUF stays with Ollama): {layer.blob}"
        )
    return {"the model config": layer.file}


def _parsed(layer: _Layer) -> Mapping[str, object]:
    try:
        data = layer.file.read()
    except ModelError as error:
        raise ModelError(f"model config: {error}") from error
    return parse_object("model config", layer.blob, data)


def _tensors(
    layer: _Layer, unreadable: dict[str, LogicalTensor], report: ReportFault, prefix: str = ""
) -> Iterator[LogicalTensor]:
    """Yields the logical tensors of one blob, by their names in the blob. Error messages have the layer's name. With a
    `prefix`, yields only a draft model's tensors, without the prefix; without one, only the other tensors."""
    try:
        entries = read_tensor_header(layer.blob, size_bytes=layer.size_bytes)
    except ModelError as error:
        report(ModelError(f"layer {layer.name}: {error}"))
        unreadable[layer.name] = placeholder_tensor(layer.name, layer.blob)
        return
    if "data" in entries:
        raise ModelError(
            f"layer {layer.name}: {layer.blob}: stored by Ollama before 0.16; create or pull the model again"
        )
    for key, entry in entries.items():
        if _is_companion(key, entries) or key.startswith(_DRAFT) != bool(prefix):
            continue
        name = key.removeprefix(prefix)
        if f"{key}.scale" in entries:
            yield LogicalTensor(name, entry, *(entries.get(key + suffix) for suffix in _COMPANIONS))
        else:
            yield LogicalTensor(name, entry)


def _is_companion(key: str, entries: Mapping[str, HeaderEntry]) -> bool:
    """Returns True if `key` holds scales or biases of another key. `router.scale` does not if there is no `router`."""
    base, dot, last = key.rpartition(".")
    return dot + last in _COMPANIONS and base in entries and f"{base}.scale" in entries
