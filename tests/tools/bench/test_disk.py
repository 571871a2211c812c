"""The benchmark of the disk cache: its arithmetic, and a miniature run."""

import json
from pathlib import Path

import pytest

from scripts.tools.bench import __main__ as bench
from scripts.tools.bench.common import exits
from scripts.tools.bench.common.contenders import SIZES
from scripts.tools.bench.disk import CASES, PLAIN, WATCHED_GAPS, WRITING, DiskReport, Times
from scripts.tools.bench.llamas import Size


def times(cold: float, memory: float, disk: float) -> Times:
    gaps = {WRITING: [2.0, 2.0, 4.5], PLAIN: [2.0, 2.0, 3.0]}
    ms = {"cold": cold, "memory": memory, "disk": disk}
    return Times(ms, dict(zip(CASES, (2000, 33, 33), strict=True)), 0.002, gaps)


def test_ratios_are_those_of_a_turn() -> None:
    report = DiskReport("10M", 2000, [times(1000, 30, 45), times(2000, 60, 66), times(4000, 100, 160)])
    found = {target.what: target for target in report.targets}
    assert found["first token, disk over memory"].value == pytest.approx(1.5)
    assert found["first token, cold over disk"].value == pytest.approx(25)
    assert all(target.met for target in found.values())
    assert found["time between tokens, writing over not"].value == pytest.approx(1.0)
    assert found["longest time between tokens, added by writing"].value == pytest.approx(1.5)
    assert "2000" in report.table()
    assert "1.500" in report.table()


def test_a_miniature_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(SIZES, "1M", Size(64, 1))
    file = tmp_path / "found.json"
    assert bench.main(["disk", "--size=1M", "--tokens=400", "--turns=1", f"--json={file}"]) in exits.MEASURED
    (turn,) = json.loads(file.read_text())["turns"]
    assert (turn["computed"]["cold"], turn["computed"]["memory"]) == (400, 33)
    assert turn["computed"]["disk"] in (32, 33, 192, 448)  # so small a model computes as fast as a busy machine reads
    assert all(took > 0 for took in turn["ms"].values())
    assert {case: len(gaps) for case, gaps in turn["gaps"].items()} == {WRITING: WATCHED_GAPS, PLAIN: WATCHED_GAPS}
