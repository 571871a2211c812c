"""The arithmetic of `scripts/bench nodes` on figures made by hand, and a miniature run of it."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from scripts.tools.bench.micro import nodes
from scripts.tools.bench.micro.nodes import STEPS, Forest, NodesReport, Times

REPORT = NodesReport(
    48,
    {
        "slices": {
            1000: [Times(0.1, 9.0, 0.2, 20.0)] * 3,
            10_000: [Times(0.1, float(cut), 0.2, 20.0) for cut in range(21)],
        }
    },
)


def test_targets_hold_for_95_of_100_turns_of_the_large_trie() -> None:
    match, cut, evict = REPORT.targets
    assert [match.value, cut.value, evict.value] == pytest.approx([0.1, 19.0, 0.2])
    assert [match.met, cut.met, evict.met] == [True, False, True]


def test_the_table_and_the_json_hold_all_of_it() -> None:
    lines = REPORT.table().splitlines()
    assert all(len(line) <= 132 for line in lines)
    (row,) = (line.split() for line in lines if line.startswith("slices, 10,000 nodes") and " cut " in line)
    assert row == ["slices,", "10,000", "nodes", "cut", "10.000", "19.000", "20.000"]
    data = json.loads(json.dumps(REPORT.data()))
    assert data["times_ms"]["slices"]["10000"]["cut"] == [*range(21)]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="not installed; scripts/bench --plot installs it")
    REPORT.plot(tmp_path / "nodes.png")
    assert (tmp_path / "nodes.png").stat().st_size > 1000


@pytest.mark.parametrize("stateful", [False, True])
def test_a_turn_does_what_it_says(stateful: bool) -> None:
    forest = Forest(120, 4, stateful, seed=1)
    assert forest.nodes == 120
    assert len({len(node.path()) for node in forest._leaves}) == 1
    ledger = forest.cache.sequences.facts.ledger
    assert ledger.nbytes == sum(node.nbytes for node in forest.cache.trie.nodes())
    for _ in range(3):
        before = forest.cache.nbytes
        forest.turn()
        assert 100 < forest.nodes < 130
        assert forest.cache.nbytes <= before + 2**16
    assert ledger.nbytes == sum(node.nbytes for node in forest.cache.trie.nodes())


def test_a_forest_grows_again() -> None:
    """However many turns there are."""
    forest = Forest(5, 2, stateful=False, seed=1)
    for _ in range(10):
        forest.turn()


def test_it_runs() -> None:
    said: list[str] = []
    report = nodes.run(Namespace(nodes=[40, 80], layers=2, turns=2, seed=1), said.append)
    assert set(report.times) == set(nodes.ORDERS)
    for by_nodes in report.times.values():
        assert {count: len(found) for count, found in by_nodes.items()} == {40: 2, 80: 2}
        assert all(ms > 0 for found in by_nodes.values() for times in found for ms in times)
    assert report.targets == []
    assert len(said) == 4
    assert all(step in report.table() for step in STEPS)
    with pytest.raises(ValueError, match="two layers"):
        nodes.run(Namespace(nodes=[40], layers=1, turns=2, seed=1), said.append)
