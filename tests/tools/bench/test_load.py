"""The load benchmark: its models, its arithmetic on turns made by hand, and a miniature run of all of it."""

import json
import os
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from runner.model import open_model
from scripts.tools.bench import __main__ as bench
from scripts.tools.bench.common import exits
from scripts.tools.bench.micro.load.benchmark import Options, measure
from scripts.tools.bench.micro.load.forms import FORMS, Made
from scripts.tools.bench.micro.load.report import FormReport, LoadReport, Row
from scripts.tools.bench.micro.load.turn import LOADERS, MLX_LM, PLAIN, RUNNER, Task, Turn
from scripts.tools.bench.micro.load.turn import measure as measure_turn

TINY_BYTES = 1 << 20
TINY = ["--size=1MiB", "--turns=1"]

Make = Callable[[str], Made]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The tiniest model of each form, written once."""
    written: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name not in written:
            written[name] = FORMS[name].make(tmp_path_factory.mktemp(name), TINY_BYTES, 1)
        return written[name]

    return get


def task(loader: str, made: Made) -> Task:
    return Task(loader, made.model, str(made.models_dir), [str(file) for file in made.files])


def turn(seconds: float, open_seconds: float | None = None, peak: int = 100, resident: int = 110) -> Turn:
    return Turn(seconds, open_seconds, peak, resident)


# --- forms ---


@pytest.mark.parametrize("form", FORMS)
def test_a_form_opens_and_its_files_hold_its_weights(form: str, make: Make) -> None:
    made = make(form)
    opened = open_model(made.model, made.models_dir)
    entries = [part for tensor in opened.tensors.values() for part in tensor.parts]
    assert opened.total_bytes == made.weight_bytes
    assert len(entries) == made.tensors
    assert {entry.file for entry in entries} == set(made.files)
    headers = sum(file.stat().st_size for file in made.files) - made.weight_bytes
    assert 0 < headers < 300 * made.tensors
    assert made.is_directory == (form in ("file", "shards", "apart"))


def test_what_makes_each_form_what_it_is(make: Make) -> None:
    opened = {form: open_model(make(form).model, make(form).models_dir) for form in FORMS}
    counts = {form: len(make(form).files) for form in FORMS}
    assert counts["file"] == 1
    assert counts["shards"] == counts["apart"] == 8
    assert counts["blobs"] == counts["packed"] == len(opened["blobs"].tensors)
    stacks = [tensor for tensor in opened["stacks"].tensors.values() if len(tensor.weight.shape) == 3]
    apart = [tensor for tensor in opened["apart"].tensors.values() if ".experts." in tensor.name]
    assert len(apart) == len(stacks) * stacks[0].weight.shape[0]
    packed = [tensor for tensor in opened["packed"].tensors.values() if tensor.scale is not None]
    assert {tensor.weight.shape[1] * 4 // (tensor.scale.shape[1] * 64 // 8) for tensor in packed if tensor.scale} == {
        4,
        8,
    }
    assert len({tensor.weight.nbytes for tensor in opened["blobs"].tensors.values()}) > 3


def test_the_same_seed_makes_the_same_bytes(make: Make, tmp_path: Path) -> None:
    made = [make("blobs")]
    for folder, seed in (("again", 1), ("other", 2)):
        (tmp_path / folder).mkdir()
        made.append(FORMS["blobs"].make(tmp_path / folder, TINY_BYTES, seed))
    first, again, other = ([file.read_bytes() for file in one.files] for one in made)
    assert first == again
    assert first != other


def test_a_form_is_about_as_large_as_wanted(tmp_path: Path) -> None:
    sizes = []
    for megabytes in (10, 40):
        (tmp_path / str(megabytes)).mkdir()
        sizes.append(FORMS["file"].make(tmp_path / str(megabytes), megabytes << 20, 1).weight_bytes >> 20)
    assert sizes == [9, 38]


# --- one turn ---


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loader", [PLAIN, RUNNER])
def test_a_turn_loads_everything(loader: str, form: str, make: Make) -> None:
    made = make(form)
    found = measure_turn(task(loader, made))
    assert 0.99 * made.weight_bytes < found.peak_bytes < 1.1 * made.weight_bytes
    assert found.seconds > 0
    if loader == RUNNER:
        assert found.open_seconds is not None
        assert 0 < found.open_seconds < found.seconds
    else:
        assert found.open_seconds is None


# --- arithmetic ---


def test_speed_is_compared_turn_by_turn() -> None:
    plain = Row(PLAIN, [turn(1.0), turn(4.0), turn(2.0)])
    runner = Row(RUNNER, [turn(2.0, 0.1, 90), turn(5.0, 0.3, 95), turn(2.0, 0.2, 99)])
    assert (plain.seconds, plain.open_seconds) == (2.0, None)
    assert (runner.seconds, runner.open_seconds, runner.peak_bytes, runner.resident_bytes) == (2.0, 0.2, 99, 110)
    assert runner.percent_of(plain) == 80.0
    assert plain.percent_of(plain) == 100.0
    assert FormReport("file", "", 1, 1, 4_000_000_000, [plain, runner]).speed(runner) == 2.0


def test_a_table_has_a_line_for_each_loader() -> None:
    rows = [Row(PLAIN, [turn(1.0)]), Row(RUNNER, [turn(1.25, 0.0125)])]
    report = LoadReport(3, 1, False, [FormReport("file", "a directory", 1234, 5, 100, rows)])
    lines = report.table().splitlines()
    assert lines[0] == "1 turns of each loader, every one in a fresh process, files in the page cache; seed 3"
    assert "file: a directory; 1,234 arrays in 5 files, 0.0 MB" in lines
    assert lines[5].split() == [PLAIN, "0.00", "100", "1.000", "1.000", "1.000", "100.0", "110.0"]
    assert lines[6].split() == [RUNNER, "0.00", "80", "1.250", "1.250", "1.250", "12.5", "100.0", "110.0"]
    assert "dropped from the page cache" in replace(report, cold=True).table()


# --- all turns ---


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the processes would have been asked; each finds its files, and takes as many seconds as ran before it."""
    tasks: list[str] = []

    def answer(command: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
        asked = Task(**json.loads(str(options["input"])))
        assert all(Path(file).exists() for file in asked.files)
        tasks.append(asked.loader)
        found = turn(float(len(tasks)))
        return subprocess.CompletedProcess(command, 0, json.dumps(found._asdict()))

    monkeypatch.setattr(subprocess, "run", answer)
    return tasks


def test_loaders_take_turns_and_the_first_round_does_not_count(asked: list[str]) -> None:
    (form,) = measure(Options(forms=["file"], size_bytes=TINY_BYTES, turns=2)).forms
    assert asked == [MLX_LM, PLAIN, RUNNER, PLAIN, RUNNER, MLX_LM, RUNNER, MLX_LM, PLAIN]
    assert [[turn.seconds for turn in row.turns] for row in form.rows] == [[4, 9], [5, 7], [6, 8]]
    assert (form.tensors, form.files, form.weight_bytes) == (219, 1, form.weight_bytes)


def test_mlx_lm_has_no_store_and_mx_load_is_always_there(asked: list[str]) -> None:
    measure(Options(forms=["blobs"], size_bytes=TINY_BYTES, turns=1))
    measure(Options(forms=["file"], loaders=[RUNNER], size_bytes=TINY_BYTES, turns=1))
    assert asked == [RUNNER, PLAIN, PLAIN, RUNNER] * 2


def test_the_models_are_gone_afterwards(asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    measure(Options(forms=["file", "stacks"], size_bytes=TINY_BYTES, turns=1))
    assert asked
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system cannot drop files from its page cache")
def test_cold_files_are_dropped_before_every_turn(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *rest: dropped.append((len(asked), *rest)))
    measure(Options(forms=["shards"], loaders=[RUNNER], size_bytes=TINY_BYTES, turns=1, cold=True))
    assert dropped == [(done, 0, 0, os.POSIX_FADV_DONTNEED) for done in range(4) for _ in range(8)]


def test_a_loader_that_fails_ends_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(FORMS, "file", FORMS["file"]._replace(make=lambda folder, *_: Made("/none", folder, [], 1, 1)))
    with pytest.raises(subprocess.CalledProcessError):
        measure(Options(forms=["file"], loaders=[RUNNER]))
    assert "open /none: no such file or directory" in capfd.readouterr().err


# --- the command ---


def test_the_json_has_the_documented_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    assert bench.main(["load", "--form=file", f"--json={file}", "--seed=7", *TINY]) in exits.MEASURED
    data = json.loads(file.read_text())
    assert set(data) == {"benchmark", "machine", "targets", "seed", "turns", "cold", "yardstick", "forms"}
    assert (data["seed"], data["turns"], data["cold"], data["yardstick"]) == (7, 1, False, PLAIN)
    (form,) = data["forms"]
    assert set(form) == {"form", "tensors", "files", "weight_bytes", "loaders"}
    assert list(form["loaders"]) == list(LOADERS)
    for found in form["loaders"].values():
        assert set(found) == {"gb_per_s", "percent", "peak_ratio", "resident_ratio", "turns"}
        assert set(found["turns"]) == set(Turn._fields)
        assert {len(values) for values in found["turns"].values()} == {1}
        assert 0.99 < found["peak_ratio"] < 1.1
    table = capsys.readouterr().out
    assert "file: a directory with one file" in table
    assert max(map(len, table.splitlines()[1:])) <= 132


def test_the_picture_is_a_png(asked: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="not installed; scripts/bench --plot installs it")
    file = tmp_path / "found.png"
    measure(Options(forms=["file", "blobs"], size_bytes=TINY_BYTES, turns=1)).plot(file)
    head = file.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(struct.unpack(">II", head[16:])) > 400
    assert asked


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["load", "--form=gguf"], "invalid choice: 'gguf'"),
        (["load", "--loaders=runner,torch"], "'torch' is none of mx.load, runner, mlx-lm"),
        (["load", "--size=much"], "'much' is not an amount of memory"),
        (["load", "--size=10%"], "'10%' is a share, not an amount of memory"),
        (["load", "--turns=0"], "there is at least one turn"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(arguments)
    assert complaint in capsys.readouterr().err.splitlines()[-1]


def test_a_system_that_cannot_drop_files_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    with pytest.raises(SystemExit, match="2"):
        bench.main(["load", "--cold", *TINY])
    assert "--cold needs posix_fadvise" in capsys.readouterr().err.splitlines()[-1]
