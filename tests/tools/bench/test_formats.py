"""The benchmark of number formats: its arithmetic on turns made by hand, and a miniature run of all of it."""

import json
from pathlib import Path

import pytest

from scripts.tools.bench import __main__ as bench
from scripts.tools.bench.formats import AUTO, FORMATS, KEEP, FormatsReport, Row, Turn


def row(name: str, keep: list[float], auto: list[float]) -> Row:
    """Answers are half as fast as prompts when kept, and as fast as auto."""
    turns = {KEEP: [Turn(speed, speed / 2) for speed in keep], AUTO: [Turn(speed, speed) for speed in auto]}
    return Row("m1", name, {KEEP: 2_000_000, AUTO: 4_000_000}, turns)


REPORT = FormatsReport([row("bfloat16", [10, 20, 30], [40, 40, 30]), row("4-bit", [5, 5, 5], [10, 10, 80])])


def test_gains_are_medians_of_turns() -> None:
    assert [one.gain("prefill") for one in REPORT.rows] == [2, 2]
    assert [one.gain("decode") for one in REPORT.rows] == [4, 4]
    assert REPORT.rows[0].speed(KEEP, "decode") == 10


def test_the_table_holds_all_against_kept_bfloat16() -> None:
    prefill, decode = REPORT.table().split("\n\n")
    assert [line.split() for line in prefill.splitlines()[2:]] == [
        ["m1", "bfloat16", "20.0", "1.00", "2.0", "40.0", "2.00", "4.0", "2.00x"],
        ["m1", "4-bit", "5.0", "0.25", "2.0", "10.0", "0.50", "4.0", "2.00x"],
    ]
    assert [line.split()[2:] for line in decode.splitlines()[2:]] == [
        ["10.0", "1.00", "2.0", "40.0", "4.00", "4.0", "4.00x"],
        ["2.5", "0.25", "2.0", "10.0", "1.00", "4.0", "4.00x"],
    ]
    assert REPORT.targets == ()


def test_a_miniature_run_measures_every_format_both_ways(tmp_path: Path) -> None:
    words = ["--busy", "--models", "m1", "--turns=1", "--prompt=4", "--tokens=1"]
    assert bench.main(["formats", *words, f"--json={tmp_path / 'found.json'}"]) == bench.MET
    rows = {one["format"]: one for one in json.loads((tmp_path / "found.json").read_text())["rows"]}
    assert set(rows) == set(FORMATS)
    held = {name: one["held_bytes"] for name, one in rows.items()}
    full = held["float32"][KEEP]
    assert held["bfloat16"][KEEP] == held["float16"][KEEP] == full / 2
    assert all(held[name][AUTO] == full for name in ("bfloat16", "float16", "float32"))
    assert held["4-bit"][KEEP] < held["8-bit"][KEEP] < held["bfloat16"][KEEP]
    for name in ("4-bit", "8-bit"):
        assert held[name][KEEP] < held[name][AUTO] < full
    for one in rows.values():
        assert {way: len(turns) for way, turns in one["turns"].items()} == {KEEP: 1, AUTO: 1}


@pytest.mark.parametrize("word", ["--turns=0", "--prompt=0", "--tokens=0"])
def test_what_makes_no_sense_is_refused(word: str) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["formats", "--busy", word])
    assert ended.value.code == bench.USAGE
