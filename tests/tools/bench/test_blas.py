"""The BLAS benchmark: its arithmetic on turns made by hand, and a miniature run of all of it."""

import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from runner import blas
from scripts.tools.bench import __main__ as bench
from scripts.tools.bench.blas import FAST, PREFILL_GAIN, ROUNDING, STOCK, BlasReport, Results, Turn, compare

SAME = Results(0.0, 1.0)


def report(results: Results = SAME, fast: float = 100.0) -> BlasReport:
    """Prompts of 8 tokens: 10, 10 and 20 tokens/s over the stock BLAS; of 16, a constant five times as much."""
    stock = [Turn({8: speed, 16: 10.0}, 5.0) for speed in (10.0, 10.0, 20.0)]
    return BlasReport("it", {STOCK: stock, FAST: [Turn({8: fast, 16: 50.0}, 20.0)] * 3}, results)


def met(found: BlasReport) -> list[bool]:
    return [target.met for target in found.targets]


def test_gains_are_medians_of_turns_and_held_against_the_target() -> None:
    assert report().gains() == {"prefill 8": 10.0, "prefill 16": 5.0, "decode": 4.0}
    assert met(report()) == [True, False, True, True]
    assert met(report(fast=10 * PREFILL_GAIN))[0]
    assert not met(report(fast=10 * PREFILL_GAIN - 1))[0]


def test_results_must_be_equal_to_rounding() -> None:
    assert met(report(Results(ROUNDING, 1.0)))[2:] == [True, True]
    assert met(report(Results(ROUNDING * 1.01, 0.99)))[2:] == [False, False]


def test_the_difference_is_relative_to_the_largest_logit() -> None:
    left = mx.array([[-8.0, 1.0, 2.0], [0.0, 3.0, 1.0]])
    assert compare(left, left) == (0.0, 1.0)
    assert compare(left, left + mx.array([[0.0, 4.0, 0.0], [0.0, 0.0, 0.0]])) == (0.5, 0.5)


def test_the_table_tells_the_speeds() -> None:
    lines = report().table().splitlines()
    assert lines[0] == "tokens/s over MLX's own BLAS and over it"
    assert [line.split() for line in lines[1:]] == [
        ["stock", "fast", "gain"],
        ["prefill", "8", "10.0", "100.0", "10.00x"],
        ["prefill", "16", "10.0", "50.0", "5.00x"],
        ["decode", "5.0", "20.0", "4.00x"],
    ]


@pytest.mark.skipif(not blas.look().matters, reason="only MLX's Linux CPU wheel has a BLAS to replace")
def test_a_miniature_run_measures_both_and_finds_the_same_results(tmp_path: Path) -> None:
    words = ["--busy", "--turns=2", "--prompts", "8", "12", "--tokens=3", "--compared=20", "--hidden=64", "--layers=1"]
    status = bench.main(["blas", *words, f"--json={tmp_path / 'found.json'}"])
    assert status in (bench.MET, bench.MISSED), "a tiny model may gain less"
    found = json.loads((tmp_path / "found.json").read_text())
    assert {who: len(turns) for who, turns in found["turns"].items()} == {STOCK: 2, FAST: 2}
    assert set(found["gains"]) == {"prefill 8", "prefill 12", "decode"}
    assert 0 < found["results"]["difference"] <= ROUNDING, "0 would say that both are one BLAS"
    assert found["results"]["agreement"] == 1.0


@pytest.mark.parametrize("words", [["--blas=off"], ["--turns=0"], ["--prompts", "0"]])
def test_what_makes_no_sense_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["blas", "--busy", *words])
    assert ended.value.code == bench.USAGE
    assert ("no faster BLAS" in capsys.readouterr().err) == (words == ["--blas=off"] or sys.platform != "linux")
