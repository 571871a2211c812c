"""The cache benchmark: the requests of its agents, one request served, and a miniature run of all of it."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from scripts.tools.bench import __main__ as bench
from scripts.tools.bench import cache as benchmark
from scripts.tools.bench import options as exits
from scripts.tools.bench.agent_trace import END, FIRST_WORD, NEWLINE, AgentTrace, Ask, Workload
from scripts.tools.bench.cache import KINDS, Contender, Served, measure
from scripts.tools.models.tiny import tiny
from tests import ROOT

SMALL = Workload(
    requests=14, system_tokens=30, user_tokens=8, tool_tokens=12, answer_tokens=2, vocabulary=64, context_tokens=200
)


# --- the requests


Told = tuple[Ask, list[int] | None]
"""A request and its answer; None if it was cancelled."""


def play(workload: Workload) -> tuple[list[Told], Counter[str]]:
    """Answers each request with words of its own."""
    trace = AgentTrace(workload)
    told: list[Told] = []
    while (ask := trace.next()) is not None:
        words = [10_000 + 100 * ask.number + index for index in range(ask.answer_tokens)]
        told.append((ask, None if ask.cancel is not None else words))
        trace.answer(told[-1][1])
    return told, trace.counts


def steps(told: Sequence[Told], operation: str) -> Iterator[tuple[Told, Ask]]:
    """The requests of an operation, each after the request before it of the same agent."""
    before: dict[int, Told] = {}
    for ask, answer in told:
        if ask.operation == operation:
            yield before[ask.agent], ask
        before[ask.agent] = ask, answer


def test_a_seed_gives_the_same_requests_in_which_everything_happens() -> None:
    first, again, other = (play(Workload(seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first[0][0][0].prompt != other[0][0][0].prompt
    asked = {"open", "restart", "user", "tool", "edit", "elide", "regenerate", "retry"}
    assert set(first[1]) == asked | {"cancelled", "dropped reasoning"}
    assert Counter(ask.operation for ask, _ in first[0]) == {name: first[1][name] for name in asked}


def test_tool_results_follow_the_answer_and_retries_repeat_the_prompt() -> None:
    told, _ = play(Workload(seed=3, requests=400, system_tokens=50, user_tokens=20, tool_tokens=30, answer_tokens=8))
    tools, again, retries = (list(steps(told, name)) for name in ("tool", "regenerate", "retry"))
    for (before, answer), after in tools:
        assert answer is not None
        shown = [*before.prompt, *answer, END, NEWLINE]
        assert after.prompt[: len(shown)] == shown
    for (before, _), after in [*again, *retries]:
        assert after.prompt == before.prompt
        assert after.seed != before.seed
    assert all(answer is None for (_, answer), _ in retries)
    assert min(len(tools), 5 * len(again), 5 * len(retries)) > 25


# --- one request and all of them


def test_a_request_says_what_was_reused_and_what_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "CHUNK_TOKENS", 8)
    one = Contender(tiny("llama"), "single")

    def serve(prompt: Sequence[int], cancel: float | None = None) -> Served:
        return one.serve(Ask(0, 0, "user", list(prompt), 3, cancel, seed=5))

    prompt = list(range(FIRST_WORD, FIRST_WORD + 20))
    first = serve(prompt)
    assert (first.total, first.matched, first.cached, first.computed) == (20, 0, 0, 20)
    assert len(first.answer) == 3
    assert min(first.answer) >= FIRST_WORD
    assert first.ttft_ms is not None
    assert 0 < first.ttft_ms <= first.ms
    assert first.held_bytes == one.cache.nbytes > 0
    again = serve([*prompt[:15], 60, 61])
    assert (again.total, again.matched, again.cached, again.computed, again.lost) == (17, 15, 15, 2, 0)
    gone = serve(range(63, 30, -1), cancel=0.3)  # after 0.3 x 32 tokens, noticed after the second chunk of 8
    assert (gone.computed, gone.answer, gone.ttft_ms) == (16, [], None)


@pytest.mark.parametrize("kind", KINDS)
def test_all_caches_give_equal_answers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "CHUNK_TOKENS", 32)
    rows, _ = measure(kind, SMALL, ["none", "single", "trie"], None)
    assert [row.mismatches for row in rows] == [0, 0, 0]
    none, single, trie = (row.figures()["hit_rate"] for row in rows)
    assert 0 == none < single < trie
    assert [one.answer for one in rows[0].served] == [one.answer for one in rows[2].served]


def test_a_miniature_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--model=llama", "--model=mamba2", "--caches=none,single", "--requests=4", "--scale=0.05", "--seed=7"]
    file = tmp_path / "found.json"
    assert bench.main(["cache", *words, "--cache-memory=64KiB", f"--json={file}"]) in exits.MEASURED
    data = json.loads(file.read_text())
    assert set(data) == {"benchmark", "machine", "targets", "workload", "budget_bytes", "counts", "models"}
    assert set(data["machine"]) == {"mlx", "device", "BLAS", "python", "system", "cores", "load", "others", "mlx-lm"}
    assert (data["workload"]["requests"], data["workload"]["seed"], data["budget_bytes"]) == (4, 7, 65536)
    assert [*data["models"]] == ["llama", "mamba2"]
    found = data["models"]["mamba2"]["single"]
    assert found["computed"] > 0
    assert found["held_bytes"] <= 65536
    assert "llama, single" in capsys.readouterr().out


def test_a_blas_that_cannot_be_loaded_is_told_before_anything_runs() -> None:
    command = [sys.executable, "-m", "scripts.tools.bench", "cache", "--blas=/no/such/library"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("scripts/bench: --blas /no/such/library: cannot be loaded")
    assert not ended.stdout
