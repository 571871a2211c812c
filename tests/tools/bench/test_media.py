"""The benchmark of pictures: its arithmetic, and a miniature run."""

import json
from pathlib import Path

import pytest

from scripts.tools.bench import __main__ as bench
from scripts.tools.bench.common import exits
from scripts.tools.bench.llamas import Size
from scripts.tools.bench.media import benchmark
from scripts.tools.bench.media.report import BLIND, CASES, OTHER, PICTURE, SEES, TEXT, Asked, MediaReport
from scripts.tools.bench.parallel.clients import Gaps


def asked(first: float, again: float, turn: float, **other: float) -> Asked:
    return Asked({"first": first, "again": again, "turn": turn, **other}, {"first": 406, "again": 4, "turn": 33})


def report(largest_s: float) -> MediaReport:
    return MediaReport(
        {
            PICTURE: [asked(900, 22, 105, other=500), asked(1800, 40, 210, other=800)],
            TEXT: [asked(600, 20, 100), asked(1200, 40, 200)],
        },
        {SEES: [99.0, 198.0], BLIND: [100.0, 200.0]},
        [Gaps(largest_s, 0.05, 30.0)],
        0.05,
    )


def test_a_picture_is_held_against_text_of_its_length_and_gaps_against_the_longest_slice() -> None:
    found = {target.what: target for target in report(0.149).targets}
    assert [round(target.value, 3) for target in found.values()] == [1.05, 1.05, 0.99, 149.0]
    assert all(target.met for target in found.values())
    *_, gap = report(0.151).targets
    assert (gap.bound, gap.met) == (150.0, False)
    assert "406 4 33" in report(0.1).table()


def test_a_miniature_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(benchmark, "SIZE", Size(64, 2))
    monkeypatch.setattr(benchmark, "LARGE", (640, 320))
    monkeypatch.setattr(benchmark, "STREAM_TOKENS", 8)
    file = tmp_path / "found.json"
    assert bench.main(["media", "--turns=1", "--busy", f"--json={file}"]) in exits.MEASURED
    found = json.loads(file.read_text())
    picture, text = (found["asked"][kind][0] for kind in (PICTURE, TEXT))
    assert picture["computed"] == text["computed"]
    assert set(picture["ms"]) == {*CASES, OTHER}
    assert found["gaps"][0]["newcomer_s"] > 0
    assert found["piece_s"] > 0
