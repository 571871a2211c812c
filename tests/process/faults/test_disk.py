"""The disk: a store that changes while it is loaded, reads that fail, and nowhere to write."""

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
from tests.process.faults.bare import bare
from tests.process.faults.demand import Demand

WEIGHT = "lm_head.weight"
NAME = "changing:latest"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A llama of its own, to be spoiled."""
    return write_store(tmp_path / "models", NAME, write_checkpoint(tmp_path / "source", "llama"))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def overwritten(path: Path) -> None:
    """Another content of the same size, in the same file."""
    path.write_bytes(b"\x7f" * path.stat().st_size)


def exchanged(path: Path) -> None:
    """Another file under the same name, as `pull` leaves one."""
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
    """As a runner reads it."""
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
    """MLX has read its header and has it open, and reads the numbers after the change. It maps no files: there is no
    SIGBUS to fear."""
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
    demand: Demand,
    start: SpawnModel,
) -> None:
    """What was opened once is served, or one line names what is missing."""
    demand.hold(point)
    process = start(NAME, executable=FAULTY, environment=demand.environment, models_dir=store.models_dir, ready=False)
    demand.await_held(point)
    change(store)
    demand.release(point)
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


def test_an_error_of_the_disk_is_told_with_the_file(demand: Demand, store: Store, start: SpawnModel) -> None:
    demand.ask("open tokenizer", "disk")
    process = start(NAME, executable=FAULTY, environment=demand.environment, models_dir=store.models_dir, ready=False)
    assert process.wait(30) == 1
    assert process.output.captured == "Error: OSError: [Errno 5] Input/output error: '/models/blobs/sha256-7f'"


def test_it_needs_nowhere_to_write(models_dir: Path, tmp_path: Path) -> None:
    """No file of any kind may grow, no directory of the environment exists, and the one it was started in is gone."""
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
    with bare(models_dir, stdout=write, stderr=write, environment=environment, before=without_a_disk) as runner:
        os.close(write)
        runner.wait_ready()
        assert runner.answer("Hi") == "jklmnopqrstuvwxyz"
        lines = os.read(read, 65536).decode().splitlines()
    os.close(read)
    assert not [line for line in lines if "level=INFO" not in line]


def test_a_trace_on_a_full_disk_is_given_up_and_requests_go_on(models_dir: Path, tmp_path: Path) -> None:
    trace, log = tmp_path / "trace.json", tmp_path / "log"

    def with_little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))

    arguments = ["--trace", str(trace), "--log-level", "warn"]
    with (
        log.open("wb") as output,
        bare(
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


def test_a_file_of_its_own_would_be_noticed(tmp_path: Path) -> None:
    """The limit of the test above holds for everybody, root included."""
    code = "import os, resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); os.write(os.open('f', 65), b'x')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False, timeout=30)
    assert b"File too large" in done.stderr
