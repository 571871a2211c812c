"""The arithmetic of `scripts/bench start` on figures made by hand, and a miniature run of it."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.tools.bench import start, start_process
from scripts.tools.bench.common.contenders import MLX_LM, OURS
from scripts.tools.bench.common.servers import Server, other_runner, this_runner
from scripts.tools.bench.llamas import Prompts
from scripts.tools.bench.start import WITH_LIBRARIES, StartReport
from scripts.tools.bench.start_process import First, Started, Took
from scripts.tools.host.lib import LoadError

FIRST = First(Took(0.030, 0.090), Took(0.020, 0.100))
REPORT = StartReport(
    3,
    {
        "1M": {
            OURS: [Started(0.20, 0.25), Started(0.25, 0.30), Started(0.90, 0.95)],
            MLX_LM: [Started(1.0, 1.1), Started(1.0, 1.1), Started(1.8, 2.0)],
        },
        "10M": {OURS: [Started(0.4, 0.5)] * 3, MLX_LM: [Started(0.8, 0.9)] * 3},
    },
    {"10M": {16: {OURS: [FIRST, FIRST, First(Took(1, 1), Took(1, 1))], "peer": [First(Took(9, 9), Took(1, 1))] * 3}}},
)


def test_a_ratio_is_the_first_over_the_later() -> None:
    assert FIRST.ratio == pytest.approx((1.5, 0.9))


def test_targets_are_medians_and_ratios_are_taken_turn_by_turn() -> None:
    of_mlx_lm, token, whole = REPORT.targets
    assert of_mlx_lm.value == pytest.approx(0.25), "of 0.2, 0.25 and 0.5"
    assert of_mlx_lm.met
    assert [target.value for target in (token, whole)] == pytest.approx([1.5, 0.9])
    assert [(target.bound, target.met) for target in (token, whole)] == [(1.2, False), (1.2, True)]


def test_without_the_smallest_model_and_mlx_lms_server_there_is_nothing_to_reach() -> None:
    assert replace(REPORT, started={"10M": REPORT.started["10M"]}, first={}).targets == []
    assert replace(REPORT, started={"1M": {OURS: [Started(0.4, 0.5)]}}, first={}).targets == []


def test_the_table_has_a_line_for_each_contender_in_milliseconds() -> None:
    lines = [line.split() for line in REPORT.table().splitlines()]
    assert [OURS, "250", "300", "400", "500"] in lines
    assert [MLX_LM, "1000", "1100", "800", "900"] in lines
    assert [f"{OURS},", "10M,", "16", "tokens", "30", "20", "1.50", "90", "100", "0.90"] in lines
    assert ["peer,", "10M,", "16", "tokens", "9000", "1000", "9.00", "9000", "1000", "9.00"] in lines


def test_json_has_every_turn() -> None:
    data = json.loads(json.dumps(REPORT.data()))
    assert data["turns"] == 3
    assert [turn["ready_s"] for turn in data["started"]["1M"][OURS]] == [0.2, 0.25, 0.9]
    assert data["first"]["10M"]["16"][OURS][0] == {
        "first": {"token_s": 0.03, "whole_s": 0.09},
        "later": {"token_s": 0.02, "whole_s": 0.1},
    }


def test_less_than_one_turn_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one turn"):
        start.run(Namespace(turns=0), print)


def only_ours(arguments: Namespace, _: object) -> list[Server]:
    return [this_runner(OURS, 1, blas=arguments.blas, blas_threads=arguments.blas_threads)]


def only_peers(arguments: Namespace, _: object) -> list[Server]:
    return [other_runner(name, command, 1) for name, command in arguments.peer]


def options(*peers: tuple[str, list[str]]) -> Namespace:
    return Namespace(size=["1M"], turns=1, seed=3, blas="auto", blas_threads=1, peer=list(peers))


def test_a_miniature_run_measures_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "servers", only_ours)
    monkeypatch.setattr(start_process, "_REST_S", 0.0)
    said: list[str] = []
    report = start.run(options(), said.append)
    assert said == ["1M ..."]
    for name in (OURS, WITH_LIBRARIES):
        (turn,) = report.started["1M"][name]
        assert 0 < turn.ready_s < turn.token_s
    assert [cell[:3] for cell in report._firsts()] == [("1M", 16, OURS), ("1M", 200, OURS)]
    for *_, (first,) in report._firsts():
        assert all(0 < took.token_s < took.whole_s for took in first)
    assert len(report.targets) == 2 * 2


def test_a_contender_that_does_not_start_is_named_by_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "servers", only_peers)
    with pytest.raises(ValueError, match="did not start: Error: no such luck"):
        start.run(options(("peer", ["sh", "-c", "echo Error: no such luck >&2; exit 3"])), print)


def test_one_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(start_process, "PATIENCE_S", 0.05)
    with pytest.raises(LoadError):
        start_process.start(other_runner("deaf", ["sh", "-c", "exec sleep 60"], 1), tmp_path, Prompts(1))
