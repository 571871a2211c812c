"""Errors for files that this user may not read name the file and the reason."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.commands.check.facts import inspect
from runner.errors import ModelError
from runner.model import open_model
from runner.settings import CheckSettings
from runner.tokenizer import open_tokenizer
from scripts.tools.models.store import Store, write_store
from tests.model.loading.conftest import Checkpoints

NOBODY = 65534


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that every user may enter, unlike pytest's own."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def closed() -> Iterator[Callable[[Path], None]]:
    """`closed(path)` removes all rights to it, and root's rights from the test. Afterwards, it restores them."""
    modes: dict[Path, int] = {}
    is_root = os.geteuid() == 0

    def close(path: Path) -> None:
        modes[path] = path.stat().st_mode
        path.chmod(0)
        if is_root:
            os.seteuid(NOBODY)

    yield close
    if is_root:
        os.seteuid(0)
    for path, mode in modes.items():
        path.chmod(mode)


def serve(model: str, models_dir: Path) -> None:
    opened = open_model(model, models_dir)
    open_tokenizer(opened.file, merge_eos=not opened.checkpoint.from_store)


def refusal(model: str, models_dir: Path) -> str:
    """Returns the error of serving; asserts that `check` reports the same and nothing else."""
    with pytest.raises(ModelError) as refused:
        serve(model, models_dir)
    problems = inspect(CheckSettings(model=model, models_dir=models_dir, log_level=0)).problems
    assert problems == [str(refused.value)]
    return problems[0]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "."])
def test_in_a_directory(name: str, checkpoint: Checkpoints, reachable: Path, closed: Callable[[Path], None]) -> None:
    directory = reachable / "d"
    shutil.copytree(checkpoint("llama"), directory)
    closed(directory / name)
    prefix = "failed to read config.json: " if name == "config.json" else ""
    assert refusal(str(directory), reachable) == f"{prefix}open {directory / name}: permission denied"


@pytest.mark.parametrize("asked", ["tiny", "TINY"])
def test_in_a_store(asked: str, checkpoint: Checkpoints, reachable: Path, closed: Callable[[Path], None]) -> None:
    """In any spelling, an unreadable file is not reported as missing."""
    store = write_store(reachable, "tiny", checkpoint("llama"))
    closed(store.models_dir / "manifests")
    path = store.models_dir / "manifests/registry.ollama.ai/library" / asked / "latest"
    assert refusal(asked, store.models_dir) == f"read manifest: open {path}: permission denied"


def blob(store: Store) -> tuple[Path, str]:
    path = store.blob_of("model.norm.weight")
    return path, f"layer model.norm.weight: open {path}: permission denied"


def manifest(store: Store) -> tuple[Path, str]:
    return store.manifest_path, f"read manifest: open {store.manifest_path}: permission denied"


def tokenizer(store: Store) -> tuple[Path, str]:
    path = store.blob_of("tokenizer.json")
    return path, f"layer tokenizer.json: open {path}: permission denied"


@pytest.mark.parametrize("part", [blob, manifest, tokenizer])
def test_single_files_of_a_store(
    part: Callable[[Store], tuple[Path, str]],
    checkpoint: Checkpoints,
    reachable: Path,
    closed: Callable[[Path], None],
) -> None:
    store = write_store(reachable, "tiny", checkpoint("llama"))
    path, line = part(store)
    closed(path)
    assert refusal("tiny", store.models_dir) == line


def test_an_unreadable_other_model_does_no_harm(
    checkpoint: Checkpoints, reachable: Path, closed: Callable[[Path], None]
) -> None:
    write_store(reachable, "other/tiny", checkpoint("llama"))
    store = write_store(reachable, "tiny", checkpoint("llama"))
    closed(store.models_dir / "manifests/registry.ollama.ai/other")
    assert open_model("Tiny", store.models_dir).architecture == "LlamaForCausalLM"
