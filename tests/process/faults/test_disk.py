"""The disk: a store that changes during loading, reads that fail, and no writable place."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast
from unittest.mock import patch

import mlx.core as mx
import pytest

from runner.errors import ModelError
from runner.model import OpenedModel, open_model
from runner.model.weights import load
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


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def overwritten(path: Path) -> None:
    """Overwrites the file in place with other bytes of the same size."""
    path.write_bytes(b"\x7f" * path.stat().st_size)


def exchanged(path: Path) -> None:
    """Replaces the file by another of the same name, as `pull` does."""
    other = path.with_name("partial")
    other.write_bytes(path.read_bytes())
    other.rename(path)


CHANGES: list[tuple[Callable[[Path], None], str | None]] = [
    (Path.unlink, "open {}: no such file or directory"),
    (cut, "{}: tensor lm_head.weight: data ends at byte "),
    (emptied, "{}: not a safetensors file: 0 bytes are too few for a header"),
    (overwritten, "{}: header of .* bytes does not fit"),
    (exchanged, None),
]


def weight(opened: OpenedModel) -> mx.array:
    """Returns the weight as the runner loads it."""
    return cast("mx.array", load.load(opened).module.parameters()["lm_head"]["weight"])


@pytest.mark.parametrize(("change", "told"), CHANGES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_blob_that_changes_before_it_is_read_is_named(
    change: Callable[[Path], None], told: str | None, store: Store
) -> None:
    wanted = weight(open_model(NAME, store.models_dir))
    opened = open_model(NAME, store.models_dir)
    change(store.blob_of(WEIGHT))
    if told is None:
        assert mx.array_equal(weight(opened), wanted)
        return
    with pytest.raises(ModelError, match=told.format(store.blob_of(WEIGHT))):
        load.load(opened)


@pytest.mark.parametrize(("change", "told"), CHANGES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_blob_that_changes_while_it_is_open_is_named_or_harmless(
    change: Callable[[Path], None], told: str | None, store: Store
) -> None:
    """MLX has opened the file and read its header, and reads the numbers after the change. It maps no files, so there
    can be no SIGBUS."""
    wanted = weight(open_model(NAME, store.models_dir))
    evaluate = mx.eval
    opened = open_model(NAME, store.models_dir)

    def changing(*arrays: object) -> None:
        patching.stop()
        change(store.blob_of(WEIGHT))
        evaluate(*arrays)

    patching = patch.object(mx, "eval", changing)
    patching.start()
    if change in (cut, emptied):
        assert told is not None
        with pytest.raises(ModelError, match=told.format(store.blob_of(WEIGHT))):
            load.load(opened)
    else:
        assert mx.array_equal(weight(opened), wanted) == (change is not overwritten)


@pytest.mark.parametrize(
    ("point", "change", "told"),
    [
        ("open model", lambda store: store.manifest_path.unlink(), "read manifest: "),
        ("open model", lambda store: store.manifest_path.write_bytes(b""), "manifest"),
        ("load", lambda store: store.manifest_path.unlink(), None),
        ("load", lambda store: store.manifest_path.write_text("{}"), None),
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
    assert process.wait(30) == 1
    assert process.output.captured.startswith("Error: ")
    assert told in process.output.captured
    assert "\n" not in process.output.captured
    assert process.output.lines[-1] == process.output.captured
    if "manifest" not in told:
        assert "sha256-" in process.output.captured


def test_a_disk_error_names_the_file(faults: FaultControl, store: Store, start: SpawnModel) -> None:
    faults.arm("open tokenizer", "disk")
    process = start(NAME, executable=FAULTY, environment=faults.environment, models_dir=store.models_dir, ready=False)
    assert process.wait(30) == 1
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


def test_tracing_stops_on_a_full_disk_and_requests_continue(models_dir: Path, tmp_path: Path) -> None:
    trace, log = tmp_path / "trace.json", tmp_path / "log"

    def with_little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))

    arguments = ["--trace", str(trace), "--log-level", "warn"]
    with (
        log.open("wb") as output,
        raw_process(
            models_dir, stdout=output.fileno(), stderr=output.fileno(), arguments=arguments, before=with_little_room
        ) as runner,
    ):
        runner.wait_ready()
        for _ in range(8):
            assert runner.answer("Hi") == "jklmnopqrstuvwxyz"
    (line,) = log.read_text().splitlines()
    assert f'msg="tracing stopped" file={trace} why="file too large"' in line
    assert 8192 < trace.stat().st_size <= 16384
    assert trace.read_text().endswith("},\n")


def test_the_file_size_limit_applies_even_to_root(tmp_path: Path) -> None:
    """Guards `test_it_runs_without_a_writable_place`: writing a file would fail there."""
    code = "import os, resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); os.write(os.open('f', 65), b'x')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False, timeout=30)
    assert b"File too large" in done.stderr
