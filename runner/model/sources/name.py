"""Ollama's model names, and the manifests that a store keeps for them (docs/internals/store.md, 1.1 to 1.3)."""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from runner.errors import MissingError, ModelError
from runner.model.sources.header import os_reason

DEFAULT_HOST = "registry.ollama.ai"
DEFAULT_NAMESPACE = "library"
DEFAULT_TAG = "latest"
_SHOWN = 20

_PARTS = {
    "host": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}"),
    "namespace": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}"),
    "model": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"),
    "tag": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"),
}


class ModelName(NamedTuple):
    """A complete name. A valid name, joined to a path, stays inside the store."""

    host: str
    namespace: str
    model: str
    tag: str

    @property
    def short(self) -> str:
        """The name as people write it: without the default host and namespace."""
        text = f"{self.host}/{self.namespace}/{self.model}:{self.tag}"
        return text.removeprefix(f"{DEFAULT_HOST}/").removeprefix(f"{DEFAULT_NAMESPACE}/")

    @property
    def folded(self) -> tuple[str, ...]:
        return tuple(part.casefold() for part in self)

    def is_valid(self) -> bool:
        return all(_PARTS[field].fullmatch(part) for field, part in zip(self._fields, self, strict=True))


def parse_name(text: str) -> ModelName:
    """Parses `[scheme://][host/][namespace/]model[:tag]`; a colon before the last slash belongs to the host's port.

    Raises ModelError for anything else, including `..` and digests.
    """
    _, _, bare = text.rpartition("://")
    head, slash, last = bare.rpartition("/")
    model, colon, tag = last.partition(":")
    parts = [*(head.split("/") if slash else ()), model]
    if len(parts) <= 3 and (tag or not colon):
        defaults = (DEFAULT_HOST, DEFAULT_NAMESPACE)
        name = ModelName(*[*defaults[: 3 - len(parts)], *parts, tag or DEFAULT_TAG])
        if name.is_valid():
            return name
    raise ModelError(f"read manifest: invalid model name {text!r}: want [host/][namespace/]model[:tag]")


def manifest_path(models_dir: Path, name: ModelName) -> Path:
    """Returns the path of the manifest for exactly this name, whether it exists or not."""
    return models_dir.joinpath("manifests", *name)


def find_manifest(models_dir: Path, name: ModelName) -> Path | None:
    """Finds the manifest of `name`: the exact spelling first, then spellings that differ only in case.

    Raises ModelError if this user may not read it.
    """
    exact = manifest_path(models_dir, name)
    try:
        if stat.S_ISREG(exact.stat().st_mode):
            return exact
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise ModelError(f"read manifest: open {exact}: {os_reason(error)}") from error
    return next((path for found, path in _manifests(models_dir) if found.folded == name.folded), None)


def missing_manifest_error(models_dir: Path, name: ModelName) -> MissingError:
    """Returns the error for a model that does not exist: Go's message, then advice; for people, the models that do."""
    stored = [found for found, _ in _manifests(models_dir)]
    tags = [found.tag for found in stored if found.folded[:-1] == name.folded[:-1]]
    if tags:
        advice = f"its tags are {', '.join(tags)}"
    elif os.path.isdir(models_dir / "manifests"):  # noqa: PTH112 - Path.is_dir raises for a closed directory
        advice = "`ollama list` names the models that are there, --models-dir another store"
    else:
        advice = f"{models_dir} holds no models: --models-dir names the store"
    names = [found.short for found in stored]
    beyond = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    there = f"it holds {', '.join(names[:_SHOWN])}{beyond}" if names else "it holds no models"
    return MissingError(
        f"read manifest: open {manifest_path(models_dir, name)}: no such file or directory ({advice})",
        f"there is no model {name.short} in {models_dir}: {there}. `ollama pull {name.short}` fetches it if Ollama's"
        " library has it, `ollama create --experimental` makes one of a directory; a directory is named by its path"
        f" (./{name.model}), another store by --models-dir",
    )


def _manifests(models_dir: Path) -> Iterator[tuple[ModelName, Path]]:
    """Yields every manifest at the right depth with a valid name; skips `.DS_Store`, stray and unreadable files."""
    for path in sorted((models_dir / "manifests").glob("*/*/*/*")):
        name = ModelName(*path.parts[-4:])
        if name.is_valid() and os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises for a closed directory
            yield name, path
