"""The benchmark of drafts: its arithmetic, and a miniature run."""

import json
from pathlib import Path

import pytest

from scripts.tools.bench import __main__ as bench
from scripts.tools.bench.common import exits
from scripts.tools.bench.common.contenders import SIZES
from scripts.tools.bench.common.gaps import Gaps
from scripts.tools.bench.drafts import models
from scripts.tools.bench.drafts.benchmark import AUTO, CASES, OFF, DraftsReport, Measured
from scripts.tools.bench.drafts.models import NONE, RIGHT, WRONG, DraftModels
from scripts.tools.bench.llamas import Size

MODELS = DraftModels(
    "10M",
    {NONE: [100.0, 50.0, 200.0], RIGHT: [150.0, 100.0, 260.0], WRONG: [99.0, 40.0, 192.0]},
    {RIGHT: 900, WRONG: 7},
)

GAPS = Gaps([[11.0, 11.0, 20.0], [9.0, 11.0, 30.0]], [[10.0, 10.0, 22.0], [5.0, 10.0, 32.0]])


def test_ratios_are_taken_turn_by_turn() -> None:
    speeds = {case: {AUTO: [50.0, 300.0, 90.0], OFF: [20.0, 100.0, 100.0]} for case in CASES}
    report = DraftsReport(3, [Measured("10M", speeds)], {}, [MODELS], {"10M": GAPS})
    found = {target.what: target for target in report.targets}
    assert found["10M, again: the prompt was answered before"].value == pytest.approx(2.5)
    right, wrong = (found[f"10M, a draft model that is {name}"] for name in (RIGHT, WRONG))
    assert [right.value, wrong.value] == pytest.approx([1.5, 0.96])
    assert [right.met, wrong.met] == [True, False]
    gap = found["10M, time between tokens beside a drafted answer"]
    longest = found["10M, longest time between tokens, added"]
    assert [gap.value, longest.value] == pytest.approx([1.1, -2.0])
    assert [gap.met, longest.met] == [False, True]
    assert "900" in report.table()


def test_a_miniature_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One draft model is always right and one is always wrong, or there are no figures."""
    monkeypatch.setitem(SIZES, "1M", Size(64, 2))
    monkeypatch.setattr(models, "M1", Size(64, 1))
    file = tmp_path / "found.json"
    assert bench.main(["drafts", "--size=1M", "--turns=1", f"--json={file}"]) in exits.MEASURED
    found = json.loads(file.read_text())
    assert set(found["models"]["1M"]) == set(CASES)
    assert all(len(turn) > 100 for (turn,) in found["gaps"]["1M"].values())
    told = found["draft_models"]["1M"]
    assert set(told["tokens_per_s"]) == {NONE, RIGHT, WRONG}
    assert all(len(speeds) == 1 and speeds[0] > 0 for speeds in told["tokens_per_s"].values())
    assert all(told["drafted"].values())
