"""The arithmetic of `scripts/bench wire` on figures made by hand, and miniature runs of its servers."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from scripts.tools.bench.micro.wire import benchmark
from scripts.tools.bench.micro.wire.benchmark import BARE, MLX_LM, OURS, SERVERS, WireReport
from scripts.tools.bench.micro.wire.client import Flow, Server, _check, measure
from scripts.tools.bench.micro.wire.load import Load, Used

REPORT = WireReport(
    3,
    {
        1: {
            OURS: [Flow(10, 20, 100), Flow(5, 5, 100), Flow(40, 50, 100)],
            BARE: [Flow(5, 5, 100), Flow(2, 3, 100), Flow(5, 5, 100)],
        },
        16: {OURS: [Flow(4, 6, 100)] * 3, BARE: [Flow(4, 1, 100)] * 3},
    },
    {1: {OURS: [Flow(1, 1, 150_000), Flow(1, 1, 250_000), Flow(1, 1, 260_000)], MLX_LM: [Flow(1, 1, 30_000)] * 3}},
)


def test_a_flow_is_told_for_each_line_of_all_streams() -> None:
    assert Flow.of(Load(4, 25, 0.01), Used(0.0005, 0.001), 0.5) == pytest.approx(Flow(5.0, 10.0, 200.0))
    assert Flow(5.0, 10.0, 200.0).used_us == 15.0


def test_targets_are_medians_of_ours() -> None:
    flood, one, many = REPORT.targets
    assert (flood.value, flood.bound, flood.met) == (250_000, 200_000, True)
    assert (one.value, one.bound, one.met) == (30, 15, False)
    assert (many.value, many.met) == (10, True)


def test_the_multiple_of_bare_sockets_is_taken_turn_by_turn() -> None:
    assert REPORT.over_bare(1, OURS) == 3.0, "of 3, 2 and 9"
    assert REPORT.over_bare(1, BARE) == 1.0


def test_the_table_and_the_json_hold_all_of_it() -> None:
    lines = REPORT.table().splitlines()
    assert all(len(line) <= 132 for line in lines)
    assert [line.split() for line in lines if line.startswith(OURS)] == [
        [OURS, "1", "stream", "10.0", "20.0", "30.0", "3.00"],
        [OURS, "16", "streams", "4.0", "6.0", "10.0", "2.00"],
        [OURS, "1", "stream", "250,000"],
    ]
    data = json.loads(json.dumps(REPORT.data()))
    assert [turn["written_us"] for turn in data["paced"]["1"][OURS]] == [20, 5, 50]
    assert [turn["lines_per_s"] for turn in data["flood"]["1"][MLX_LM]] == [30_000] * 3


def test_the_picture_has_a_place_for_every_server(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="not installed; scripts/bench --plot installs it")
    REPORT.plot(tmp_path / "wire.png")
    assert (tmp_path / "wire.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("load", [Load(2, 5, 0.002), Load(2, 50, 0.0)], ids=["paced", "flood"])
@pytest.mark.parametrize("name", [OURS, BARE])
def test_a_server_brings_every_line_and_tells_what_it_took(name: str, load: Load) -> None:
    flow = measure(SERVERS[name], load)
    assert min(flow) > 0


def test_mlx_lms_server_can_be_fed_too() -> None:
    pytest.importorskip("transformers", reason="mlx_lm.server needs it")
    assert min(measure(SERVERS[MLX_LM], Load(2, 5, 0.002))) > 0


def test_a_stream_that_misses_a_line_is_no_measurement() -> None:
    _check([[b'{"Content":" wo', b'rd"}\n{"Content":" word"}']], 2)
    with pytest.raises(ValueError, match="1 lines came instead of 2"):
        _check([[b'" word"', b'" word"'], [b'" word"']], 2)


def test_a_server_that_does_not_start_is_named() -> None:
    with pytest.raises(ValueError, match=r"scripts\.tools\.bench\.micro\.wire\.nobody did not start"):
        measure(Server("scripts.tools.bench.micro.wire.nobody", "/", ""), Load(1, 1, 0.0))


def test_every_server_takes_part_in_every_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is slow is flooded with fewer lines."""
    measured: list[tuple[str, Load]] = []

    def note(server: Server, load: Load) -> Flow:
        measured.append((server.module.rpartition(".")[2], load))
        return Flow(1.0, 2.0, 3.0)

    monkeypatch.setattr(benchmark, "measure", note)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: sys)
    report = benchmark.run(Namespace(turns=2, steps=7, lines=1600, streams=[1, 4]), lambda _: None)
    assert {streams: list(flows) for streams, flows in report.paced.items()} == {
        streams: [OURS, BARE, MLX_LM] for streams in (1, 4)
    }
    assert {streams: list(flows) for streams, flows in report.flood.items()} == {
        streams: [OURS, MLX_LM] for streams in (1, 4)
    }
    assert all(
        len(found) == 2 for flows in (*report.paced.values(), *report.flood.values()) for found in flows.values()
    )
    assert {(name, load.streams): load.steps for name, load in measured if not load.interval_s} == {
        ("ours", 1): 1600,
        ("mlx_lm_server", 1): 160,
        ("ours", 4): 400,
        ("mlx_lm_server", 4): 40,
    }


@pytest.mark.parametrize("wrong", [{"turns": 0}, {"steps": 0}, {"streams": [1, 0]}, {"lines": 10}])
def test_options_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        benchmark.run(Namespace(**{"turns": 1, "steps": 1, "lines": 1000, "streams": [1], **wrong}), print)
