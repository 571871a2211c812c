"""Recognizes files of other programs by their names and first bytes, and explains in an error what to do with them."""

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NoReturn

from runner.errors import ModelError

HEAD_BYTES = 40
_GGUF = (
    "GGUF, which stays with Ollama: write `FROM ./FILE.gguf` into a Modelfile, then `ollama create NAME -f Modelfile`"
)
_HEADS = {
    b"version https://git-lfs.github.com/spec/": "a pointer of git-lfs, not the file itself: `git lfs pull` fetches it",
    b"gguf": _GGUF,
    b"pk\x03\x04": "a checkpoint of PyTorch: download the model as safetensors",
    b"<!doctype html": "a web page: download the file itself (`hf download ORG/NAME --local-dir DIR`)",
}
"""The first bytes of a file, in lower case -> the kind of file, and advice. No file of a model begins like this."""
_WEIGHTS = frozenset({".safetensors", ".bin", ".pth", ".gguf", ".npz"})
_MOST_FOLDERS = 100


def is_weights(path: str) -> bool:
    """Returns True if `path` has the suffix of a file of weights."""
    return Path(path).suffix in _WEIGHTS


def refuse_foreign(path: Path, head: bytes) -> None:
    """Raises ModelError if `head`, the first HEAD_BYTES bytes of the file, shows a kind that no valid model has."""
    for start, what in _HEADS.items():
        if head.lower().startswith(start):
            raise ModelError(f"{path} is {what}", advice="")


def refuse_file(path: Path) -> NoReturn:
    """Raises ModelError, with advice, for a `path` that is a file but should be a directory."""
    refuse_foreign(path, _head(path))
    known = f": {path.parent}" if _holds_config(path.parent) else ""
    raise ModelError(f"open {path}: not a directory; name the one that holds config.json{known}", advice="")


def _holds_config(directory: Path) -> bool:
    return os.path.isfile(directory / "config.json")  # noqa: PTH113 - Path.is_file raises for closed directories


def _head(path: Path) -> bytes:
    """Returns the first bytes of a file; no bytes if it is unreadable, a pipe or a device."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb", buffering=0) as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""


def refuse_without_weights(directory: Path, pattern: str, names: Sequence[str], folders: Sequence[str]) -> None:
    """Raises ModelError for a directory without files of `pattern`, if it holds `config.json` or its kind is
    recognized. `names` are its files and `folders` its folders."""
    others = [*filter(is_weights, names)]
    what = _what_it_is(directory, {*names}, others, folders)
    if what or "config.json" in names:
        lack = f"no {pattern} in {directory}" + (f", only {', '.join(others)}" if others else "")
        raise ModelError(f"{lack}: {what}" if what else lack, advice="" if what else None)


def _what_it_is(directory: Path, names: set[str], others: Sequence[str], folders: Sequence[str]) -> str:
    """Returns the kind of the directory, with advice; empty if unknown. `others` are weight files of other kinds."""
    if "adapter_config.json" in names:
        return (
            "it is an adapter (adapter_config.json); merge it into its base model (mlx_lm.fuse, or merge_and_unload of"
            " PEFT), and name the result"
        )
    if "model_index.json" in names:
        return "it is a pipeline of diffusers (model_index.json), and this runner serves language models"
    if others and all(name.endswith(".gguf") for name in others):
        return _GGUF
    if "model.safetensors.index.json" in names:
        return "the files that model.safetensors.index.json names are missing; continue the download"
    if any(name.endswith((".bin", ".pth")) for name in others):
        return "download a revision with safetensors, or write them with save_pretrained of transformers"
    if "weights.npz" in others:
        return "an mlx-lm of 2023 wrote it; download a newer conversion, or convert the original (mlx_lm.convert)"
    if "config.json" in names:
        return ""
    if {"snapshots", "refs"} <= {*folders}:
        snapshot = next((directory / "snapshots").glob("*"), "a folder in snapshots")
        return f"it belongs to Hugging Face's cache; name {snapshot}"
    if {"blobs", "manifests"} <= {*folders}:
        return f"it is an Ollama store; --models-dir {directory} --model NAME serves a model of it"
    for folder in islice(folders, _MOST_FOLDERS):
        if _holds_config(directory / folder):
            return f"config.json is in {directory / folder}; name that directory"
    return "" if names or folders else "it is empty"
