"""The arithmetic of `scripts/bench memory` on figures made by hand, and a miniature run of it."""

import importlib.util
import json
import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.tools.bench.common.contenders import MLX_LM, OURS
from scripts.tools.bench.llamas import Prompts, Size
from scripts.tools.bench.memory import benchmark
from scripts.tools.bench.memory.benchmark import MemoryReport
from scripts.tools.bench.memory.growth import Growth, Sample, Slope, rss
from scripts.tools.bench.memory.sharing import Shape, requests

SHAPE = Shape(prefix=100, conversations=3, turns=2, message=10, answer=5)
TINY = Size(64, 1)
DISTINCT = 100 + 6 * 15 - 3
REPORT = MemoryReport(
    SHAPE,
    "4MiB",
    1000,
    {
        OURS: Growth(Sample(0, 10**6, 0), Sample(0, 2 * 10**6, 1050 * DISTINCT)),
        MLX_LM: Growth(Sample(0, 10**6, None), Sample(0, 4 * 10**6, None)),
    },
    {
        OURS: [Sample(at, 10**7 + 10**5 * at, 10**6) for at in range(1, 9)],
        MLX_LM: [Sample(at, 2 * 10**7, None) for at in range(1, 9)],
    },
)


def answered() -> list[list[int]]:
    """What the model has seen after each request of all conversations."""
    prompts, shown, said = Prompts(1), [], list[int]()
    for prompt in requests(SHAPE, prompts.ids):
        asked, said = prompt(said), prompts.ids(SHAPE.answer)
        shown.append([*asked, *said[:-1]])
    return shown


def test_conversations_take_turns_and_go_on_with_what_was_answered() -> None:
    shown = answered()
    first, second = shown[:3], shown[3:]
    assert [len(tokens) for tokens in first] == [114] * 3
    assert [len(tokens) for tokens in second] == [129] * 3
    for before, after in zip(first, second, strict=True):
        assert after[:114] == before
        assert after[:100] == first[0][:100]


def test_distinct_tokens_are_those_of_a_tree() -> None:
    tree = set[tuple[int, ...]]()
    for count, shown in enumerate(answered(), 1):
        tree |= {tuple(shown[:end]) for end in range(1, len(shown) + 1)}
        assert len(tree) == SHAPE.distinct(count)
    assert SHAPE.distinct(0) == 0


def test_text_takes_the_same_turns() -> None:
    said = ""
    prompts = [said := prompt(f"<{said[-1:]}>") for prompt in requests(SHAPE, lambda count: f"{count} ")]
    assert prompts[0] == prompts[1] == prompts[2] == "100 10 "
    assert prompts[3] == "100 10 < >10 "


def test_a_slope_is_that_of_the_second_half() -> None:
    assert Slope.of([1, 2, 3, 4], [500, 300, 100, 110]) == pytest.approx(Slope(100, 10))
    assert Slope.of([0, 10, 20, 30, 40, 50], [0, 0, 0, 100, 90, 110]).share == pytest.approx(10 / 95)
    assert Slope.of([1, 2, 3, 4], [1, 2, 8, 8]).share == 0
    with pytest.raises(ValueError, match="fewer than two"):
        Slope.of([1, 2, 3], [1, 2, 3])


def test_the_memory_of_a_process_is_that_of_this_one() -> None:
    before = rss(os.getpid())
    held = bytearray(os.urandom(1 << 20) * 64)
    assert 48 << 20 < rss(os.getpid()) - before < 128 << 20
    del held


def test_targets_hold_for_ours() -> None:
    held, growth = REPORT.targets
    assert [held.value, growth.value] == pytest.approx([1.05, 100 * 3e5 / 10.5e6])
    assert [held.met, growth.met] == [True, False]
    assert replace(REPORT, processes={}, samples={}).targets == []


def test_the_table_and_the_json_hold_all_of_it() -> None:
    lines = REPORT.table().splitlines()
    assert all(len(line) <= 132 for line in lines)
    ours, others = ([line.split() for line in lines if line.startswith(name)] for name in (OURS, MLX_LM))
    assert ours == [["ours", "0.2", "1.05", "1.0", "5.35"], ["ours", "8", "10.5", "2.86", "100.00"]]
    assert others == [[MLX_LM, "-", "-", "3.0", "16.04"], [MLX_LM, "8", "20.0", "0.00", "0.00"]]
    data = json.loads(json.dumps(REPORT.data()))
    assert data["processes"][OURS]["after"]["rss"] == 2 * 10**6
    assert data["samples"][MLX_LM][0] == {"prompts": 1, "rss": 2 * 10**7, "told": None}


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="not installed; scripts/bench --plot installs it")
    for report in (REPORT, replace(REPORT, processes={}), replace(REPORT, samples={})):
        report.plot(tmp_path / "memory.png")
        assert (tmp_path / "memory.png").stat().st_size > 1000


def arguments(**others: object) -> Namespace:
    usual = {"measure": None, "seed": 1, "prompts": 8, "prompt_tokens": 5, "cache_memory": "64KiB"}
    return Namespace(**{**usual, **SHAPE._asdict(), "blas": "auto", "blas_threads": 1, "peer": [], **others})


def test_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mlx-lm's server, which takes seconds to start."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    said: list[str] = []
    report = benchmark.run(arguments(), said.append, benchmark.Sizes(TINY, TINY))
    assert report.token_bytes == 2 * 64 * 4
    assert set(report.processes) == set(report.samples) == {OURS}
    assert report.processes[OURS].after.told is not None
    assert [one.prompts for one in report.samples[OURS]] == [*range(1, 9)]
    assert len(report.targets) == 2
    assert any("left out" in line for line in said)
    with pytest.raises(ValueError, match="four prompts"):
        benchmark.run(arguments(prompts=3), said.append, benchmark.Sizes(TINY, TINY))
