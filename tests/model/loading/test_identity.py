"""Weights are known by their bytes, never by a name: what another model computed is not taken for one's own."""

import os
import shutil
from pathlib import Path

import pytest

from runner.disk.namespace import weights_identity
from runner.model.sources.model_directory import open_directory
from runner.model.sources.ollama_store import open_store
from scripts.tools.models.checkpoints import write_checkpoint
from scripts.tools.models.store import write_store


def identity(directory: Path) -> list[str]:
    return weights_identity(open_directory(directory, "m"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", "llama")


def test_a_directory_is_itself_until_something_is_written(source: Path, tmp_path: Path) -> None:
    whole = identity(source)
    assert identity(source) == whole
    (source / "tokenizer_config.json").write_text("{}")  # keys and values are a function of token ids
    assert identity(source) == whole
    shutil.copytree(source, tmp_path / "copy")
    assert identity(tmp_path / "copy") != whole
    config = source / "config.json"
    before = config.read_text()
    config.write_text(before + " ")
    assert identity(source) != whole
    config.write_text(before)
    assert identity(source) == whole


def test_weights_rewritten_in_place_are_others(source: Path) -> None:
    whole = identity(source)
    weights = next(source.glob("*.safetensors"))
    stat, data = weights.stat(), bytearray(weights.read_bytes())
    data[-1] ^= 1
    with weights.open("r+b") as file:
        file.write(data)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # whoever puts the time back
    assert weights.stat().st_size == stat.st_size
    assert identity(source) != whole


def test_blobs_are_known_by_their_digests_wherever_they_lie(source: Path, tmp_path: Path) -> None:
    stores = [write_store(tmp_path / name, model, source) for name, model in (("a", "one:latest"), ("b", "two:latest"))]
    one, two = (weights_identity(open_store(model, tmp_path / name)) for name, model in (("a", "one"), ("b", "two")))
    assert stores
    assert one == two
    assert any(line.startswith("sha256 ") for line in one)
    snapshot, blobs = tmp_path / "hub" / "snapshot", tmp_path / "hub" / "blobs"
    shutil.copytree(source, snapshot)
    blobs.mkdir()
    weights = next(snapshot.glob("*.safetensors"))
    weights.rename(blobs / ("ab" * 32))
    weights.symlink_to(blobs / ("ab" * 32))
    assert f"sha256 {'ab' * 32}" in identity(snapshot)
