"""The cache benchmark: its arithmetic on examples made by hand, and a miniature run of all of it."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.tools.bench import __main__ as bench
from scripts.tools.bench import cache as benchmark
from scripts.tools.bench import options as exits
from scripts.tools.bench.agent_trace import FIRST_WORD, AgentTrace, Ask, Workload
from scripts.tools.bench.cache import (
    KINDS,
    Contender,
    Row,
    Served,
    Size,
    Subject,
    make_subject,
    measure,
    report,
    serve_all,
)
from scripts.tools.bench.report import percentile
from tests import ROOT

SIZE = Size(hidden=128, layers=1, vocabulary=64)
SMALL = Workload(
    requests=14, system_tokens=30, user_tokens=8, tool_tokens=12, answer_tokens=2, vocabulary=64, context_tokens=200
)


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "HIDDEN", SIZE.hidden)
    monkeypatch.setattr(benchmark, "LAYERS", SIZE.layers)
    monkeypatch.setattr(benchmark, "CHUNK_TOKENS", 32)


def asking(prompt: Sequence[int], *, number: int = 0, answer_tokens: int = 3, cancel: float | None = None) -> Ask:
    return Ask(number, 0, "user", list(prompt), answer_tokens, cancel, seed=5)


def served(**changed: object) -> Served:
    usual = {"total": 10, "matched": 0, "cached": 0, "computed": 10, "ttft_ms": 1.0, "ms": 2.0}
    more = {"held_bytes": 0, "peak_bytes": 0, "answer": []}
    return Served(**{**usual, **more, **changed})  # type: ignore[arg-type]  # checked where they are used


@pytest.fixture(scope="module")
def plain() -> Subject:
    return make_subject("plain", SIZE)


def contender(subject: Subject, kind: str, chunk: int = 8) -> Contender:
    return Contender(subject, kind, chunk=chunk, vocabulary=SIZE.vocabulary, budget_bytes=None)


# --- arithmetic ---


def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed() -> None:
    assert [percentile(range(1, 101), 95), percentile([3, 1, 2], 50), percentile([], 50)] == [95, 2, 0]


ROW = Row(
    "trie",
    [
        served(total=50, computed=5, ttft_ms=10.0, ms=20.0, held_bytes=70, peak_bytes=90),
        served(total=30, matched=29, cached=25, computed=2, ttft_ms=None, ms=5.0, held_bytes=80, peak_bytes=85),
        served(total=20, matched=20, cached=19, computed=1, ttft_ms=30.0, ms=75.0, held_bytes=81, peak_bytes=81),
    ],
    mismatches=1,
)


def test_figures_are_sums_over_all_requests() -> None:
    assert ROW.figures() == {
        "hit_rate": 0.44,
        "matched": 49,
        "computed": 8,
        "lost": 5,
        "lost_p95": 4,
        "ttft_ms": 20.0,
        "ttft_ms_p95": 30.0,
        "seconds": 0.1,
        "held_bytes": 81,
        "peak_bytes": 90,
        "mismatches": 1,
    }


def test_the_table_has_a_row_for_each_cache_and_the_trie_a_target() -> None:
    found = report(SMALL, None, {"open": 3}, {"plain": [ROW._replace(cache="none", mismatches=0), ROW]})
    rows = [line.split() for line in found.table().splitlines()]
    assert ["plain,", "trie", "44.0", "49", "8", "5", "4", "20.0", "30", "0.1", "0.0", "0.0", "1"] in rows
    assert max(map(len, found.table().splitlines())) <= 132
    (target,) = found.targets
    assert (target.value, target.met) == (1, False)


# --- one request ---


def test_a_request_says_what_was_reused_and_what_was_computed(plain: Subject) -> None:
    one = contender(plain, "single")
    prompt = list(range(FIRST_WORD, FIRST_WORD + 20))
    first = one.serve(asking(prompt))
    assert (first.total, first.matched, first.cached, first.computed) == (20, 0, 0, 20)
    assert len(first.answer) == 3
    assert min(first.answer) >= FIRST_WORD
    assert first.ttft_ms is not None
    assert 0 < first.ttft_ms <= first.ms
    assert first.held_bytes == one.cache.nbytes > 0
    again = one.serve(asking([*prompt[:15], 60, 61]))
    assert (again.total, again.matched, again.cached, again.computed, again.lost) == (17, 15, 15, 2, 0)


def test_a_cancelled_request_ends_within_its_prefill(plain: Subject) -> None:
    one = contender(plain, "single")
    prompt = list(range(FIRST_WORD, FIRST_WORD + 33))
    gone = one.serve(asking(prompt, cancel=0.3))  # after 0.3 x 32 tokens, noticed after the second chunk of 8
    assert (gone.computed, gone.answer, gone.ttft_ms) == (16, [], None)
    assert one.serve(asking(prompt)).cached == 16


# --- all requests ---


class Fake:
    """A contender that answers at once, with a word of its own from the third request on, and notes its turns."""

    def __init__(self, word: int, turns: list[int]) -> None:
        self._word = word
        self._turns = turns

    def serve(self, ask: Ask) -> Served:
        self._turns.append(self._word)
        word = self._word if ask.number > 1 else FIRST_WORD
        return served(answer=[] if ask.cancel is not None else [word] * ask.answer_tokens)


def test_contenders_take_turns_and_the_first_ones_answers_go_on() -> None:
    turns: list[int] = []
    workload = Workload(seed=2, requests=12, agents=1, vocabulary=30, user_tokens=4, tool_tokens=4)
    found, counts = serve_all(AgentTrace(workload), [Fake(50, turns), Fake(51, turns), Fake(52, turns)])
    assert turns == [50, 51, 52, 51, 52, 50, 52, 50, 51] * 4
    assert sum(counts.values()) >= 12
    for word, answers in zip((50, 51, 52), found, strict=True):
        assert {one.answer[0] for one in answers[2:] if one.answer} == {word}


@pytest.mark.parametrize("kind", KINDS)
def test_all_caches_give_equal_answers(kind: str) -> None:
    rows, _ = measure(kind, SMALL, ["none", "single", "trie"], None)
    assert [row.mismatches for row in rows] == [0, 0, 0]
    none, single, trie = (row.figures()["hit_rate"] for row in rows)
    assert 0 == none < single < trie
    assert [one.answer for one in rows[0].served] == [one.answer for one in rows[2].served]


def test_a_bound_of_memory_is_kept_and_costs_hits() -> None:
    rates = []
    for budget in (None, 60_000):
        ((row,), _) = measure("plain", SMALL, ["trie"], budget)
        rates.append(row.figures()["hit_rate"])
        assert (row.figures()["held_bytes"] <= 60_000) == (budget is not None)
    assert 0 < rates[1] < rates[0]


# --- the command ---


def test_a_miniature_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--model=plain", "--model=recurrent", "--caches=none,single", "--requests=4", "--scale=0.05", "--seed=7"]
    file = tmp_path / "found.json"
    assert bench.main(["cache", *words, f"--json={file}"]) in exits.MEASURED
    data = json.loads(file.read_text())
    assert set(data) == {"benchmark", "machine", "targets", "workload", "budget_bytes", "counts", "models"}
    assert set(data["machine"]) == {"mlx", "device", "BLAS", "python", "system", "cores", "load", "others", "mlx-lm"}
    assert (data["workload"]["requests"], data["workload"]["seed"]) == (4, 7)
    assert [*data["models"]] == ["plain", "recurrent"]
    assert [*data["models"]["recurrent"]] == ["none", "single"]
    found = data["models"]["plain"]["single"]
    assert set(found) == {*ROW.figures(), "requests"}
    assert {len(values) for values in found["requests"].values()} == {4}
    assert sum(found["requests"]["computed"]) == found["computed"]
    assert "plain, single" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["cache", "--caches=none,lru"], "'lru' is none of trie, single, none"),
        (["cache", "--model=rnn"], "invalid choice: 'rnn'"),
        (["cache", "--agents=0"], "a workload has at least one"),
        (["cache", "--cache-memory=lots"], "'lots' is not an amount of memory"),
        (["nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = bench.main(arguments)
    except SystemExit as end:
        status = int(str(end.code))
    assert status == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]


def test_a_blas_that_cannot_be_loaded_is_told_before_anything_runs() -> None:
    command = [sys.executable, "-m", "scripts.tools.bench", "cache", "--blas=/no/such/library"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("scripts/bench: --blas /no/such/library: cannot be loaded")
    assert not ended.stdout
