"""The arithmetic of `scripts/bench wire` on figures made by hand, and a miniature run."""

import json
from argparse import Namespace

import pytest

from scripts.tools.bench.micro import wire
from scripts.tools.bench.micro.wire import FLOOR, OURS, Flow, WireReport, check
from scripts.tools.bench.micro.wire_server import Load, Used

REPORT = WireReport(
    3,
    {
        OURS: {1: [Flow(10, 20, 100), Flow(5, 5, 100), Flow(40, 50, 100)], 16: [Flow(4, 6, 100)] * 3},
        FLOOR: {1: [Flow(5, 5, 100), Flow(5, 5, 100), Flow(10, 8, 100)], 16: [Flow(4, 4, 100)] * 3},
    },
    {
        OURS: {1: [Flow(1, 1, 150_000), Flow(1, 1, 250_000), Flow(1, 1, 260_000)]},
        FLOOR: {1: [Flow(1, 1, 300_000)] * 3},
    },
)


def test_a_flow_is_told_for_each_line_of_all_streams() -> None:
    assert Flow.of(Load(4, 25, 0.01), Used(0.0005, 0.001), 0.5) == pytest.approx(Flow(5.0, 10.0, 200.0))
    assert Flow(5.0, 10.0, 200.0).used_us == 15.0


def test_targets_are_ratios_taken_turn_by_turn() -> None:
    one, many = REPORT.targets
    assert (one.value, one.bound, one.met) == (3, 2, False)
    assert (many.value, many.met) == (1.25, True)


def test_the_table_and_the_json_hold_all_of_it() -> None:
    rows = [line.split() for line in REPORT.table().splitlines()]
    assert ["ours,", "1", "stream", "10.0", "20.0", "30.0", "250,000"] in rows
    assert ["floor,", "16", "streams", "4.0", "4.0", "8.0"] in rows
    data = json.loads(json.dumps(REPORT.data()))
    assert [turn["written_us"] for turn in data["paced"][OURS]["1"]] == [20, 5, 50]
    assert [turn["lines_per_s"] for turn in data["flood"][OURS]["1"]] == [150_000, 250_000, 260_000]


def test_a_stream_that_misses_a_line_is_no_measurement() -> None:
    check([[b'{"Content":" wo', b'rd"}\n{"Content":" word"}']], 2)
    with pytest.raises(ValueError, match="1 lines came instead of 2"):
        check([[b'" word"', b'" word"'], [b'" word"']], 2)


def test_a_miniature_run() -> None:
    said: list[str] = []
    report = wire.run(Namespace(turns=1, steps=5, lines=10_000, streams=[2]), said.append)
    for loads in (report.paced, report.flood):
        assert {name: {streams: len(flows) for streams, flows in by.items()} for name, by in loads.items()} == {
            OURS: {2: 1},
            FLOOR: {2: 1},
        }
        assert min(min(by[2][0]) for by in loads.values()) > 0
    assert said == ["2 loads in 1 turns ..."]


@pytest.mark.parametrize("wrong", [{"turns": 0}, {"steps": 1}, {"streams": [1, 0]}, {"lines": 9_999}])
def test_options_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        wire.run(Namespace(**{"turns": 1, "steps": 2, "lines": 10_000, "streams": [1], **wrong}), print)
