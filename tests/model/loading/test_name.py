"""The meaning of `--model`: names and paths (docs/internals/wire.md, 1.10, docs/internals/store.md, 1.2)."""

import os
from pathlib import Path

import pytest

from runner.errors import ModelError
from runner.model import open_model
from runner.model.sources.manifest import find_manifest, manifest_path
from runner.model.sources.name import parse_model_name
from scripts.tools.models.store import write_store
from tests.model.loading.conftest import Checkpoints


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("demo", "registry.ollama.ai/library/demo/latest"),
        ("demo:1b-q4_K", "registry.ollama.ai/library/demo/1b-q4_K"),
        ("me/demo", "registry.ollama.ai/me/demo/latest"),
        ("hf.co/org/repo.v2:Q8_0", "hf.co/org/repo.v2/Q8_0"),
        ("localhost:5000/a/b", "localhost:5000/a/b/latest"),
        ("localhost:5000/a/b:tag", "localhost:5000/a/b/tag"),
        ("https://registry.ollama.ai/library/demo:x", "registry.ollama.ai/library/demo/x"),
        ("_Case.Kept:T", "registry.ollama.ai/library/_Case.Kept/T"),
        ("m" * 80, f"registry.ollama.ai/library/{'m' * 80}/latest"),
    ],
)
def test_a_name_has_one_manifest_path(text: str, path: str, tmp_path: Path) -> None:
    assert manifest_path(tmp_path, parse_model_name(text)) == tmp_path / "manifests" / path


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "demo:", ":tag", "/demo", "demo/", "a//b", "a/b/c/d", "x/../y", "..", "a/..", "-demo", ".demo"),
        *("demo:.hidden", "name space/demo", "na.me/demo", "de:mo:tag", "demo@sha256:00", "demo\n", "d\u00e9mo"),
        "a\\b",
        *("m" * 81, "demo:" + "t" * 81, f"{'h' * 351}/a/b", "demo\0"),
    ],
)
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match="read manifest: invalid model name"):
        parse_model_name(text)


def test_a_manifest_must_be_a_file_at_the_right_depth(tmp_path: Path) -> None:
    manifest_path(tmp_path, parse_model_name("demo")).mkdir(parents=True)
    with pytest.raises(ModelError, match=r"^read manifest: open .*: is a directory$"):
        open_model("demo", tmp_path)


def test_case_is_ignored_only_where_the_exact_name_is_absent(tmp_path: Path) -> None:
    for name in ("Demo:Big", "DEMO:big", "other:latest"):
        path = manifest_path(tmp_path, parse_model_name(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    for stray in (".DS_Store", "registry.ollama.ai/.DS_Store", "registry.ollama.ai/library/demo"):
        (tmp_path / "manifests" / stray).write_text("")
    (tmp_path / "manifests/registry.ollama.ai/library/Demo/.DS_Store").write_text("")
    for asked, found in (("demo:BIG", "DEMO/big"), ("Demo:Big", "Demo/Big"), ("DEMO:big", "DEMO/big")):
        assert str(find_manifest(tmp_path, parse_model_name(asked))).endswith(found)
    assert find_manifest(tmp_path, parse_model_name("library/OTHER")) is not None
    assert find_manifest(tmp_path, parse_model_name("me/other")) is None
    assert find_manifest(tmp_path / "absent", parse_model_name("other")) is None


def test_any_form_of_a_path_opens_the_directory(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint("llama")
    monkeypatch.chdir(directory.parent)
    monkeypatch.setenv("HOME", str(directory.parent))
    for text in (str(directory), f"./{directory.name}", directory.name, f"~/{directory.name}", f"{directory}{os.sep}"):
        opened = open_model(text, tmp_path)
        assert opened.name == text
        assert (opened.title, opened.directory) == (directory.name, str(directory))
        assert not opened.checkpoint.from_store


def test_a_snapshot_in_the_cache_of_hugging_face_is_called_by_its_repository(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """The last folder of its path is a digest."""
    snapshot = tmp_path / "models--me--Tiny-1B" / "snapshots" / "0123abcd"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(checkpoint("llama"))
    opened = open_model(str(snapshot), tmp_path)
    assert (opened.title, opened.directory) == ("me/Tiny-1B", str(snapshot))


def test_a_name_in_the_store_beats_a_directory_that_happens_to_be_called_so(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts pass names, from whatever working directory they were started in."""
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    write_store(tmp_path / "models", "tiny", checkpoint("llama"))
    for name in ("tiny", "registry.ollama.ai/library/tiny"):
        opened = open_model(name, tmp_path / "models")
        assert opened.checkpoint.from_store
        assert (opened.title, opened.directory) == ("tiny:latest", "")


def test_a_very_long_word_is_no_directory_and_no_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="read manifest: invalid model name"):
        open_model("x" * 300, tmp_path)
