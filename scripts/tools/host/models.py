"""The models that `scripts/host` can name: those of a store, or one directory. Needs no MLX and reads no weights."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import ModelError
from runner.model.sources.manifest import find_manifest, read_manifest, stored_tags, tag_name
from runner.model.sources.name import DEFAULT_NAMESPACE, ModelName, parse_model_name

_JSON = "application/vnd.ollama.image.json"
_SAFETENSORS = "safetensors"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Model:
    """A model as a host knows it without running it."""

    name: str
    """The name as it is shown, its tag included."""
    argument: str
    """The value of the runner's `--model`."""
    digest: str
    """64 hexadecimal digits; models of one digest share a runner."""
    size_bytes: int
    modified: float
    """`time.time()` of its last change."""
    files: Mapping[str, Path] = field(repr=False)
    """Its tokenizer and configuration files by name."""
    config: Mapping[str, object] = field(default_factory=dict, repr=False)
    """The store's description of it."""

    @property
    def details(self) -> dict[str, object]:
        return {
            "parent_model": "",
            "format": self.config.get("model_format", _SAFETENSORS),
            "family": self.config.get("model_family", ""),
            "families": self.config.get("model_families"),
            "parameter_size": self.config.get("model_type", ""),
            "quantization_level": self.config.get("file_type", ""),
        }

    @property
    def has_renderer(self) -> bool:
        """True if a host renders its chats with code of its own, not with the model's template."""
        return bool(self.config.get("renderer"))

    @property
    def sees(self) -> bool:
        """True if a host says that it takes pictures: by its description alone, whatever its tensors are."""
        config = self.json("config.json")
        return isinstance(config.get("vision_config"), dict) or config.get("has_vision") is True

    def text(self, name: str) -> str | None:
        """Returns the text of one of its files; None if it has none of that name."""
        path = self.files.get(name)
        return path.read_text(encoding="utf-8", errors="replace") if path is not None and path.is_file() else None

    def json(self, name: str) -> dict[str, object]:
        """Returns the object in one of its files; empty if there is no such file or object."""
        try:
            value = json.loads(self.text(name) or "{}")
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


class Catalog:
    """The models of a store and, in front of them, the one directory that was named."""

    def __init__(self, models_dir: Path, directory: Path | None = None) -> None:
        self._models_dir = models_dir
        self._directory = _of_directory(directory) if directory is not None else None

    def find(self, name: str) -> Model | None:
        """Returns the model that a user calls `name`, with or without a tag."""
        single = self._directory
        if single is not None:
            names = (single.name, single.name.removesuffix(":latest"))
            if name.lower() in names or name == single.argument:
                return single
        try:
            parsed = parse_model_name(name)
            path = find_manifest(self._models_dir, parsed)
        except ModelError:
            return None
        if path is None:
            return None
        return _of_manifest(parsed if parsed.digest else tag_name(path), path, self._models_dir)

    def all(self) -> list[Model]:
        """Returns every model that is kept as safetensors, the newest first."""
        tags = stored_tags(self._models_dir)
        models = [model for name, path in tags if (model := _of_manifest(name, path, self._models_dir))]
        stored = [model for model in models if model.config.get("model_format") == _SAFETENSORS]
        single = [self._directory] if self._directory is not None else []
        return single + sorted(stored, key=lambda model: -model.modified)


def _of_directory(directory: Path) -> Model:
    files = {path.name: path for path in directory.iterdir() if path.is_file()}
    name = re.sub(r"[^a-z0-9_.-]+", "-", directory.resolve().name.lower()).strip("-.") or "model"
    config = files.get("config.json")
    identity = str(directory.resolve()).encode() + (config.read_bytes() if config is not None else b"")
    return Model(
        name=f"{name}:latest",
        argument=str(directory.resolve()),
        digest=hashlib.sha256(identity).hexdigest(),
        size_bytes=sum(path.stat().st_size for path in files.values()),
        modified=max((path.stat().st_mtime for path in files.values()), default=0.0),
        files=files,
    )


def _of_manifest(name: ModelName, path: Path, models_dir: Path) -> Model | None:
    """Returns the model of one tag; None if there is no manifest for this runner in it."""
    try:
        raw = path.read_bytes()
        manifest: dict[str, Any] = dict(read_manifest(models_dir, path).content)
        layers = [*manifest["layers"], manifest["config"]]
        blobs = {layer["digest"]: _blob(models_dir, layer["digest"]) for layer in layers}
        size_bytes = sum(layer["size"] for layer in layers)
        files = {layer["name"]: blobs[layer["digest"]] for layer in layers if layer["mediaType"] == _JSON}
        config = json.loads(blobs[manifest["config"]["digest"]].read_bytes())
    except (ModelError, OSError, ValueError, KeyError, TypeError):
        return None
    return Model(
        name=_shortest(name),
        argument=_shortest(name),
        digest=hashlib.sha256(raw).hexdigest(),
        size_bytes=size_bytes,
        modified=path.stat().st_mtime,
        files=files,
        config=config if isinstance(config, dict) else {},
    )


def _blob(models_dir: Path, digest: str) -> Path:
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"invalid digest {digest!r}")
    return models_dir / "blobs" / digest.replace(":", "-")


def _shortest(name: ModelName) -> str:
    """Returns the name as Ollama shows it: without its defaults, always with its tag."""
    last = f"{name.model}:{name.tag}"
    if not name.is_public:
        return f"{name.host}/{name.namespace}/{last}"
    return last if name.namespace == DEFAULT_NAMESPACE else f"{name.namespace}/{last}"
