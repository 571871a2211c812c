"""Ollama's model names and where a store keeps their manifests (store.md, sections 1.1 to 1.3)."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from runner.errors import ModelError

DEFAULT_HOST = "registry.ollama.ai"
DEFAULT_NAMESPACE = "library"
DEFAULT_TAG = "latest"

_PARTS = {
    "host": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}"),
    "namespace": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}"),
    "model": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"),
    "tag": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}"),
}


class ModelName(NamedTuple):
    """A complete name. Every part is checked, so joining them to a path stays inside the store."""

    host: str
    namespace: str
    model: str
    tag: str

    @property
    def folded(self) -> tuple[str, ...]:
        return tuple(part.casefold() for part in self)

    def is_valid(self) -> bool:
        return all(_PARTS[field].fullmatch(part) for field, part in zip(self._fields, self, strict=True))


def parse_name(text: str) -> ModelName:
    """`[scheme://][host/][namespace/]model[:tag]`; a colon before the last slash belongs to the host's port.

    Raises ModelError for anything else, so also for `..` and for digests.
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
    """Where the manifest of exactly this name lies, or would lie."""
    return models_dir.joinpath("manifests", *name)


def find_manifest(models_dir: Path, name: ModelName) -> Path | None:
    """The manifest of `name`: the exact spelling first, then any spelling that differs in case only."""
    exact = manifest_path(models_dir, name)
    try:
        if exact.is_file():
            return exact
        return next(
            (path for path in _manifests(models_dir) if ModelName(*path.parts[-4:]).folded == name.folded), None
        )
    except OSError as error:
        raise ModelError(f"read manifest: open {exact}: {os.strerror(error.errno or 0).lower()}") from error


def _manifests(models_dir: Path) -> Iterator[Path]:
    """Every manifest at the right depth under a name that is one; `.DS_Store` and stray files are neither."""
    for path in sorted((models_dir / "manifests").glob("*/*/*/*")):
        if ModelName(*path.parts[-4:]).is_valid() and path.is_file():
            yield path
