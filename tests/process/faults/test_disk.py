"""The disk: a store that changes during loading, reads that fail, and no writable place."""

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.tools.models.checkpoints import write_checkpoint
from scripts.tools.models.store import Store, write_store
from tests import ROOT
from tests.process.conftest import FAULTY, SpawnModel
from tests.process.faults.fault_control import FaultControl
from tests.process.faults.raw_process import raw_process

WEIGHT = "lm_head.weight"
NAME = "changing:latest"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A llama that the test may damage."""
    return write_store(tmp_path / "models", NAME, write_checkpoint(tmp_path / "source", "llama"))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("point", "change", "told"),
    [
        ("open model", lambda store: store.manifest_path.unlink(), "read manifest: "),
        ("load", lambda store: store.manifest_path.unlink(), None),
        ("load", lambda store: shutil.rmtree(store.models_dir / "blobs"), "no such file or directory"),
        ("read tensors", lambda store: cut(store.blob_of(WEIGHT)), "it is truncated"),
        ("open tokenizer", lambda store: store.blob_of("tokenizer.json").unlink(), "no such file or directory"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_store_that_changes_while_a_process_loads_it(
    point: str,
    change: Callable[[Store], None],
    told: str | None,
    store: Store,
    tmp_path: Path,
    faults: FaultControl,
    start: SpawnModel,
) -> None:
    """Files that are open already are served; otherwise one line names the missing one."""
    faults.hold(point)
    process = start(NAME, executable=FAULTY, environment=faults.environment, models_dir=store.models_dir, ready=False)
    faults.await_held(point)
    change(store)
    faults.release(point)
    if told is None:
        process.wait_ready(60)
        assert not process.output.captured
        return
    assert process.wait(60) == 1
    assert process.output.captured.startswith("Error: ")
    assert told in process.output.captured
    assert "\n" not in process.output.captured
    assert process.output.lines[-1] == process.output.captured
    if "manifest" not in told:
        assert "sha256-" in process.output.captured


def test_a_disk_error_names_the_file(faults: FaultControl, store: Store, start: SpawnModel) -> None:
    faults.arm("open tokenizer", "disk")
    process = start(NAME, executable=FAULTY, environment=faults.environment, models_dir=store.models_dir, ready=False)
    assert process.wait(60) == 1
    assert process.output.captured == "Error: OSError: [Errno 5] Input/output error: '/models/blobs/sha256-7f'"


def test_it_runs_without_a_writable_place(models_dir: Path, tmp_path: Path) -> None:
    """No file may grow, no directory named in the environment exists, and the working directory has been removed."""
    gone = tmp_path / "gone"
    gone.mkdir()

    def without_a_disk() -> None:
        os.chdir(gone)
        gone.rmdir()
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    nowhere = str(tmp_path / "nowhere")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        **dict.fromkeys(("HOME", "TMPDIR", "TMP", "TEMP", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME"), nowhere),
    }
    read, write = os.pipe()
    with raw_process(models_dir, stdout=write, stderr=write, environment=environment, before=without_a_disk) as runner:
        os.close(write)
        runner.wait_ready()
        assert runner.answer("Hi") == "jklmnopqrstuvwxyz"
        lines = os.read(read, 65536).decode().splitlines()
    os.close(read)
    assert not [line for line in lines if "level=INFO" not in line]
