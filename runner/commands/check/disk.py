"""What `mlx-runner check --disk-cache DIR` says about the directory."""

import json
from pathlib import Path

import msgspec

from runner.disk.files import Files
from runner.disk.segment import format_of

_MOST_ABOUT = 1 << 20


class KeptModel(msgspec.Struct, frozen=True):
    """A model whose conversations are kept; one of other weights, versions or types counts as another."""

    name: str
    folder: str
    files: int
    bytes: int


class DiskFacts(msgspec.Struct, frozen=True):
    """The directory of the disk cache, the largest model first."""

    directory: str
    models: list[KeptModel]


def disk_facts(directory: Path | None) -> DiskFacts | None:
    """Returns what is in a directory; None without one. What cannot be read is left out."""
    if directory is None:
        return None
    models = []
    try:
        folders = [name for name in Files().names(directory) if format_of(name) is not None]
    except OSError:
        folders = []
    for folder in folders:
        try:
            sizes = {entry.name: entry.nbytes for entry in Files().entries(directory / folder)}
            if sizes.get("about.json", _MOST_ABOUT) >= _MOST_ABOUT:  # of another kind, perhaps: a pipe would never end
                continue
            about = json.loads((directory / folder / "about.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        name = about.get("model") if isinstance(about, dict) else None
        models.append(KeptModel(str(name), folder, len(sizes), sum(sizes.values())))
    return DiskFacts(str(directory), sorted(models, key=lambda model: (-model.bytes, model.folder)))
