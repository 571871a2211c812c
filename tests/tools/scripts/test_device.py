"""The check of a device, on a CPU: its parts, and what becomes of parts that crash, hang or do not run."""

import base64
import gzip
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest

from runner.model.scans import functions
from runner.model.scans.kernel import Rule
from scripts.tools.device import __main__ as device
from scripts.tools.device import checks, scans
from scripts.tools.device.parts import PARTS, Part, Row, guarded
from scripts.tools.device.result import scrubbed
from tests import ROOT
from tests.lib.kernels import in_front
from tests.lib.programs import python

pytestmark = pytest.mark.skipif(not in_front(), reason="the kernels are not in front of MLX")
Scan = Callable[..., tuple[mx.array, mx.array]]
CASE = scans.Case(Rule.DELTA, 5, 32, rows=4, texts=2, heads=2, keys=2)


HERE = "tests.tools.scripts.device_parts"


def part(name: str, limit_s: float = 60, *, alone: bool = False) -> Part:
    return Part(name, "", f"{HERE}:{name}", limit_s, alone)


class Try(NamedTuple):
    """A run of the check on fake parts: its exit status, its output, its file, and the parts that ran."""

    status: int
    said: str
    file: dict[str, Any]
    ran: list[str]

    def statuses(self) -> dict[str, str]:
        return {name: outcome["status"] for name, outcome in self.file["parts"].items()}


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Try]:
    notes = tmp_path / "notes"
    monkeypatch.setenv("DEVICE_NOTES", str(notes))
    monkeypatch.setattr(device, "INSTALLATION", part("installation"))
    monkeypatch.setattr(device, "WORKERS", 2)

    def run(parts: Sequence[Part], *words: str) -> Try:
        notes.write_text("")
        monkeypatch.setattr(device, "PARTS", (part("installation"), *parts))
        status = device.main(["--folder", str(tmp_path), *words])
        (path,) = tmp_path.glob("device-check-Some-GPU-1-*.json")
        return Try(status, capsys.readouterr().out, json.loads(path.read_text()), notes.read_text().split())

    return run


def test_each_part_costs_itself_only_and_the_next_run_goes_on(
    attempt: Callable[..., Try], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_GRACE_S", 0.1)
    monkeypatch.setattr(device, "_wait", _with(vars(device)["_wait"], _until_it_has_said_something))
    parts = [part("differs"), part("crashes"), part("raises"), part("hangs", 0), part("passes", alone=True)]
    first = attempt(parts, "--tiny")
    assert first.status == 1
    ends = {"installation": "passed", "differs": "differed", "crashes": "failed", "raises": "failed"}
    ends |= {"hangs": "stopped", "passes": "passed"}
    assert first.statuses() == ends
    assert sorted(first.ran) == sorted(first.statuses())
    outcomes = first.file["parts"]
    assert outcomes["installation"]["rows"][0]["figures"] == {"device": "Some GPU/1", "ms": 1.235}
    assert "ended: Segmentation fault" in first.said
    assert outcomes["crashes"]["rows"] == [{"name": "before", "found": "tiny"}]
    assert "no kernel" in outcomes["raises"]["output"][-1]
    assert outcomes["differs"]["output"] == ["a library writes of ~/x"]
    assert outcomes["differs"]["rows"][1] == {"name": "wrong", "found": "~/models differs", "good": False}
    assert gzip.decompress(base64.b64decode(outcomes["differs"]["tapes"]["wrong.tape"])) == b"tape"
    assert "not run: hangs" in first.said
    assert ended(int(outcomes["hangs"]["rows"][0]["found"]))

    again = attempt(parts, "--tiny")
    assert again.ran == ["installation", "hangs"], "what is missing"
    assert again.statuses() == ends | {"hangs": "failed"}, "twice is a fault"
    assert attempt(parts, "--tiny", "--only", "passes").status == 0


def ended(pid: int) -> bool:
    try:
        return "(zombie)" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def test_an_end_before_the_end_keeps_what_was_found(
    attempt: Callable[..., Try], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(device, "_wait", _with(vars(device)["_wait"], _interrupt))
        first = attempt([part("passes"), part("hangs", alone=True)])
    assert first.statuses() == {"installation": "passed", "passes": "passed"}
    assert "not run: hangs" in first.said
    with monkeypatch.context() as patch:
        patch.setattr(device, "_LEAST_S", 1e9)
        second = attempt([part("passes"), part("raises")], "--fresh")
    assert (second.status, second.ran) == (0, ["installation"]), "the minutes are over"
    assert second.statuses() == {"installation": "passed"}
    assert "not run: passes, raises" in second.said


def _with(wait: Callable[..., bool], before: Callable[[Path], None]) -> Callable[..., bool]:
    """Has `before` called with the lines of the part that hangs."""

    def waits(process: object, part: Part, lines: Path, *rest: object) -> bool:
        if part.name == "hangs":
            before(lines)
        return wait(process, part, lines, *rest)

    return waits


def _until_it_has_said_something(lines: Path) -> None:
    while not lines.read_bytes().endswith(b"\n"):
        time.sleep(0.01)


def _interrupt(lines: Path) -> None:
    raise KeyboardInterrupt


def test_names_of_people_and_machines_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "ann")
    monkeypatch.setattr("platform.node", lambda: "anns-mac")
    assert scrubbed(f"{ROOT}/x of ann on anns-mac: /d/ann, plan") == "./x of USER on HOST: /d/USER, plan"


@pytest.mark.full
def test_nothing_is_wrong_here(tmp_path: Path) -> None:
    done = python("-m", "scripts.tools.device", "--tiny", "--folder", str(tmp_path), cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    parts = json.loads(path.read_text())["parts"]
    assert {part["status"] for part in parts.values()} == {"passed"}
    assert parts.keys() == {part.name for part in PARTS}
    assert [row["name"] for row in parts["layers"]["rows"]] == ["llama", "gemma3_text"]
    assert str(ROOT) not in path.read_text()


def _rough(scan: Scan, *inputs: object) -> tuple[mx.array, mx.array]:
    y, state = scan(*inputs)
    return y * (1 + 1e-5), state


def _cut(scan: Scan, rule: Rule, arrays: list[mx.array], *rest: object) -> tuple[mx.array, mx.array]:
    y, state = scan(rule, arrays, *rest)
    return y, mx.where(arrays[2].shape[1] < CASE.tokens, state * (1 + 2e-7), state)


def _beside(scan: Scan, rule: Rule, arrays: list[mx.array], *rest: object) -> tuple[mx.array, mx.array]:
    y, state = scan(rule, arrays, *rest)
    return mx.where(len(y) < CASE.texts, y * (1 + 2e-7), y), state


@pytest.mark.parametrize("wrong", [_rough, _cut, _beside])
def test_a_wrong_scan_is_found(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., object]) -> None:
    assert checks.scan_row(CASE).good
    scan = vars(scans)["scan"]
    monkeypatch.setattr(scans, "scan", lambda *inputs: wrong(scan, *inputs))
    assert not checks.scan_row(CASE).good


def test_a_wrong_architecture_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row.good for row in checks.architecture_rows("mamba2")] == [True]
    with monkeypatch.context() as patch:
        patch.setattr(functions, "available", lambda *_, **__: False)
        (row,) = checks.architecture_rows("mamba")
        assert (row.name, row.good) == ("mamba", False)
        assert "nodes" in row.found
    scan = vars(functions)["scan"]
    monkeypatch.setattr(
        functions, "scan", lambda rule, arrays, *rest: scan(rule, [arrays[0] * 1.1, *arrays[1:]], *rest)
    )
    assert [row.good for row in checks.architecture_rows("mamba2")] == [False]


def test_an_error_is_the_row_of_its_item_alone() -> None:
    rows = [*guarded(checks.architecture_rows, ["nobodys", "mamba2"])]
    assert [(row.name, row.good) for row in rows] == [("nobodys", False), ("mamba2", True)]
    assert "ModuleNotFoundError" in rows[0].found


def test_a_device_without_kernels_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "available", lambda rule: rule is not Rule.WKV)
    assert [*checks.scan_rows(tiny=True)] == [Row("kernels", "none for WKV", good=False)]
