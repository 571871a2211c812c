"""Finds and reads manifests in both trees of Ollama's store (docs/internals/store.md, 1.1 to 1.5)."""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from runner import json_files
from runner.errors import MissingError, ModelError
from runner.model.sources.checkpoint import Child, File
from runner.model.sources.name import DEFAULT_HOST, PUBLIC_HOST, PUBLIC_HOSTS, ModelName, hub_advice
from runner.model.sources.safetensors import os_reason
from runner.sizes import listed

LEGACY, CURRENT = "manifests", "manifests-v2"
"""The two trees, which hold tags: one of all releases, and one of Ollama 0.40, which is searched first."""
BLOBS = "blobs"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
LIST = "application/vnd.ollama.manifest.list.v2+json"
RUNNER = "mlx"
"""The `runner` of the children in a manifest list that this runner can serve."""
DIGEST = re.compile(r"sha256[:-][0-9a-fA-F]{64}")
_BLOB = re.compile(r"sha256-[0-9a-f]{64}")
_SHOWN = 20
_PARSING = "parse manifest"


class Manifest(NamedTuple):
    """A manifest, with its content at the time of reading."""

    path: Path
    """The manifest's file: the file of a tag, or the blob of a child in a list."""
    content: Mapping[str, object]
    children: Sequence[Child] = ()
    """All manifests of the list in which this manifest was found; empty without a list."""


def manifest_path(models_dir: Path, name: ModelName, tree: str = LEGACY) -> Path:
    """Returns the path of the tag with exactly this name in the tree `tree`. The file may not exist."""
    host = name.host
    if tree == CURRENT:
        host = (PUBLIC_HOST if name.is_public else host).replace(":", "%3A")
    return models_dir.joinpath(tree, host, *name[1:])


def find_manifest(models_dir: Path, name: ModelName) -> Path | None:
    """Returns the file of the manifest `name`: a blob with this digest, else a tag in either tree, else a tag whose
    name differs only in case; None if there is none.

    Ignores a dangling link in the current tree. Raises ModelError if the user lacks permission, or if several blobs
    begin with the digest.
    """
    if name.digest:
        found = [path for path in (models_dir / BLOBS).glob(f"sha256-{name.digest}*") if _BLOB.fullmatch(path.name)]
        if len(found) > 1:
            raise ModelError(f'read manifest: ambiguous digest prefix "{name.digest}" in {models_dir / BLOBS}')
        if found or len(name.digest) == 64:
            return next(iter(found), None)
    hosts = [name.host, *(host for host in PUBLIC_HOSTS if name.is_public and host != name.host)]
    exact = [manifest_path(models_dir, name, CURRENT)]
    exact += [manifest_path(models_dir, name._replace(host=host)) for host in hosts]
    for path in exact:
        try:
            path.stat(follow_symlinks=path == exact[0])
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ModelError(f"read manifest: open {path}: {os_reason(error)}") from error
        return path
    return next((path for stored, path in stored_tags(models_dir) if stored.folded == name.folded), None)


def stored_tags(models_dir: Path) -> Iterator[tuple[ModelName, Path]]:
    """Yields the name and the file of every tag, the current tree first. Yields a name in both trees only once. Skips
    files at another depth, with an invalid name such as `.DS_Store`, or in an unreadable folder."""
    seen = set[ModelName]()
    for tree in (CURRENT, LEGACY):
        for path in sorted((models_dir / tree).glob("*/*/*/*")):
            name = tag_name(path)
            # Path.is_file raises for a closed directory.
            if name not in seen and name.is_valid() and os.path.isfile(path):  # noqa: PTH113
                seen.add(name)
                yield name, path


def tag_name(path: Path) -> ModelName:
    """Returns the model name of a tag's file in either tree. The host is the default host for Ollama's own registry."""
    tree, host, *rest = path.parts[-5:]
    name = ModelName(re.sub("%3[Aa]", ":", host) if tree == CURRENT else host, *rest)
    return name._replace(host=DEFAULT_HOST) if name.is_public else name


def read_manifest(models_dir: Path, path: Path) -> Manifest:
    """Reads the manifest in `path`, a result of `find_manifest`, once. From a list, takes the first child for this
    runner. Checks links as Ollama does. Raises ModelError."""
    children: list[Child] = []
    try:
        content = parse_object(_PARSING, path, _read_tag(models_dir, path))
        if not _is_list(content):
            return Manifest(path, content)
        entries = _entries(path, content)
        children = [_child(entry, models_dir) for entry in entries]
        for entry, child in zip(entries, children, strict=True):
            if child.runner == RUNNER and entry.get("mediaType") in (None, "", MANIFEST):
                if not child.digest:
                    return Manifest(path, entry, children)
                if child.is_local:
                    return Manifest(*_referenced(models_dir, child), children)
                break  # like Ollama, try no second child for the same runner
    except ModelError as error:
        if str(error).startswith("parse manifest"):
            raise
        raise ModelError(f"read manifest: {error}") from error
    there = ", ".join(map(str, children)) or "none"
    advice = ""
    if any(child.runner == RUNNER for child in children):
        advice = '. Ollama fetches it for this runner: curl OLLAMA/api/pull -d \'{"model": NAME, "runner": "mlx"}\''
    raise ModelError(
        f"read manifest: no compatible manifest found for runners: {RUNNER} (in the list {path}: {there}{advice})"
    )


def missing_manifest_error(models_dir: Path, name: ModelName) -> MissingError:
    """Returns the error for a missing model. Hosts see Go's message and advice, people the names of stored models."""
    stored = [found for found, _ in stored_tags(models_dir)]
    tags = [found.tag for found in stored if found.folded[:-1] == name.folded[:-1]]
    if tags:
        advice = f"its tags are {', '.join(tags)}"
    elif any(os.path.isdir(models_dir / tree) for tree in (LEGACY, CURRENT)):  # noqa: PTH112 - is_dir may raise
        advice = "`ollama list` names the models that are there, --models-dir another store"
    else:
        advice = f"{models_dir} holds no models: --models-dir names the store"
    hub = hub_advice(name.short)
    if hub:
        advice += f"; {hub}"
    names = [found.short for found in stored]
    there = f"it holds {listed(names, _SHOWN)}" if names else "it holds no models"
    return MissingError(
        f"read manifest: open {manifest_path(models_dir, name)}: no such file or directory ({advice})",
        f"there is no model {name.short} in {models_dir}: {there}. `ollama pull {name.short}` fetches it if Ollama's"
        " library has it, `ollama create` makes one of a directory; a directory is named by its path"
        f" (./{name.model}), another store by --models-dir{hub and f'; {hub}'}",
    )


def _read_tag(models_dir: Path, path: Path) -> bytes:
    """Returns the content of a tag's file. A link must lead to a blob whose name is the digest of its content; any
    other file must lie in the folder of its tree. Raises ModelError if not."""
    real = Path(os.path.realpath(path))
    if not path.is_symlink():
        root = models_dir / path.relative_to(models_dir).parts[0]
        if not real.is_relative_to(os.path.realpath(root)):
            raise ModelError(f'manifest path "{path}" resolves outside manifest directory')
        return File(path).read()
    if not _BLOB.fullmatch(real.name):
        raise ModelError(f'manifest symlink target "{real}" is not a sha256 blob')
    blob = models_dir / BLOBS / real.name
    if not blob.exists() or not blob.samefile(real):
        raise ModelError(f'manifest symlink target "{real}" does not match blob "{blob}"')
    return _read_blob(blob)


def _read_blob(blob: Path) -> bytes:
    data = File(blob).read()
    if hashlib.sha256(data).hexdigest() != blob.name.removeprefix("sha256-"):
        raise ModelError(f"digest mismatch: {blob} has another content than its name says; pull the model again")
    return data


def parse_object(what: str, path: Path, data: bytes) -> Mapping[str, object]:
    """Returns the JSON object in `data`, the content of `path`. Raises ModelError: its message begins with `what`."""
    try:
        content = json_files.parse(data)
    except ValueError as error:
        raise ModelError(f"{what}: {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{what}: {path}: want a JSON object, found {type(content).__name__}")
    return content


def _is_list(content: Mapping[str, object]) -> bool:
    return content.get("mediaType") == LIST or ("manifests" in content and "layers" not in content)


def _entries(path: Path, content: Mapping[str, object]) -> list[Mapping[str, object]]:
    entries = content.get("manifests")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ModelError(f"parse manifest: {path}: want a list of manifests, found {entries!r:.80}")
    if any(_is_list(entry) for entry in entries):
        raise ModelError(f"nested manifest lists are not supported: {path}")
    return entries


def _child(entry: Mapping[str, object], models_dir: Path) -> Child:
    """Returns the child of one entry in a list. The entry has the digest of a manifest, or is a manifest itself."""
    runner, form = (entry.get(key) for key in ("runner", "format"))
    words = (runner if isinstance(runner, str) else "").strip().lower(), form if isinstance(form, str) else ""
    config = entry.get("config")
    if entry.get("layers") or (isinstance(config, dict) and config.get("digest")):
        return Child(*words)
    digest = entry.get("digest")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise ModelError(f"invalid digest format: {digest!r:.80}")
    digest = digest.replace(":", "-").lower()
    return Child(*words, digest, (models_dir / BLOBS / digest).exists())


def _referenced(models_dir: Path, child: Child) -> tuple[Path, Mapping[str, object]]:
    blob = models_dir / BLOBS / child.digest
    content = parse_object(_PARSING, blob, _read_blob(blob))
    if _is_list(content):
        raise ModelError(f"nested manifest lists are not supported: {blob}")
    return blob, content
