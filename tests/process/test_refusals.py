"""A model that cannot be served ends the process at once with one line, for a host as for `mlx-runner check`."""

import re
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.tools.host.lib import capture
from scripts.tools.models.checkpoints import write_checkpoint
from scripts.tools.models.store import Store, write_store
from tests.model.loading.malformed import CASES, WEIGHT, flip, with_config
from tests.process.conftest import SpawnModel, command

MOST_CPU_S = 8.0
"""A start that imports MLX takes less than one; to read 64 GiB takes many more."""

CHOSEN = ("blob missing", "blob of gigabytes", "tensor missing")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A random llama that the test may damage."""
    return write_store(tmp_path / "models", "tiny", write_checkpoint(tmp_path / "source", "llama"))


@pytest.fixture
def cheap() -> Iterator[None]:
    """Checks that the processes which the test started used little processor time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    yield
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MOST_CPU_S


def refusal(store: Store, start: SpawnModel, *arguments: str) -> str:
    """Returns the line with which the process ends, without `Error: `."""
    process = start("tiny", arguments, models_dir=store.models_dir, ready=False)
    assert process.wait(60) == 1
    assert "Traceback" not in process.output.text
    (line,) = (line for line in process.output.lines if capture(line))
    assert line == process.output.lines[-1] == process.output.captured
    assert line.startswith("Error: ")
    return line.removeprefix("Error: ")


def check(store: Store, *arguments: str) -> subprocess.CompletedProcess[str]:
    return command("check", "tiny", "--models-dir", str(store.models_dir), *arguments)


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.usefixtures("cheap")
def test_a_broken_store_is_one_line_and_exit_status_1(name: str, store: Store, start: SpawnModel) -> None:
    """tests/model opens these stores, and many more, in process and compares the whole line."""
    CASES[name].spoil(store)
    line = refusal(store, start)
    assert CASES[name].matches(line), line


@pytest.mark.usefixtures("cheap")
def test_check_prints_the_line_that_serving_ends_with(store: Store, start: SpawnModel) -> None:
    CASES["tokenizer not json"].spoil(store)
    done = check(store)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == f"PROBLEM       {refusal(store, start)}"
    assert done.stderr == ""


@pytest.mark.usefixtures("cheap")
def test_a_model_that_cannot_compute_never_becomes_ready(tmp_path: Path, start: SpawnModel) -> None:
    """It would report that it is ready, and then fail every request."""
    store = write_store(tmp_path / "models", "tiny", write_checkpoint(tmp_path / "source", "deepseek_v3"))
    with_config(num_experts_per_tok=99)(store)
    line = refusal(store, start)
    assert re.fullmatch("the model cannot compute: ValueError: .*kth.*", line), line


def test_a_changed_blob_is_refused_before_loading_only_with_verify(store: Store, start: SpawnModel) -> None:
    flip(WEIGHT)(store)
    start("tiny", models_dir=store.models_dir)  # serves
    line = refusal(store, start, "--verify")
    assert line.startswith(
        f"digest mismatch, file must be downloaded again: want {store.layer(WEIGHT)['digest']}, got "
    )
    assert line.endswith(str(store.blob_of(WEIGHT)))
    assert check(store).returncode == 0
    done = check(store, "--verify")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == f"PROBLEM       {line}"
