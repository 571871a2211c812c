"""The cache benchmark: its arithmetic on examples made by hand, and a miniature run of all of it."""

import json
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.tools.bench import __main__ as bench
from scripts.tools.bench.cache.agent_trace import FIRST_WORD, AgentTrace, Ask, Workload
from scripts.tools.bench.cache.benchmark import Options, measure, serve_all
from scripts.tools.bench.cache.contender import Contender, LayerBytes, Served
from scripts.tools.bench.cache.figures import Costs, Losses
from scripts.tools.bench.cache.models import CHUNK, HEAD, KINDS, WINDOW, Size, Subject, make_subject
from scripts.tools.bench.cache.prefixes import Anywhere, FixedPoints, Prefixes, Reuse, Shown
from scripts.tools.bench.common import exits
from scripts.tools.bench.common.report import percentile
from tests import ROOT

SIZE = Size(hidden=128, layers=1, vocabulary=64)
SMALL = Workload(
    requests=14, system_tokens=30, user_tokens=8, tool_tokens=12, answer_tokens=2, vocabulary=64, context_tokens=200
)
TINY = ["--hidden=128", "--layers=1", "--vocabulary=64", "--requests=4", "--system-tokens=20", "--answer-tokens=2"]


def asking(prompt: Sequence[int], *, number: int = 0, answer_tokens: int = 3, cancel: float | None = None) -> Ask:
    return Ask(number, 0, "user", list(prompt), answer_tokens, cancel, seed=5)


def served(**changed: object) -> Served:
    usual = {"total": 10, "matched": 0, "cached": 0, "computed": 10, "ttft_ms": 1.0, "ms": 2.0}
    more = {"held_bytes": 0, "peak_bytes": 0, "answer": [], "shown": []}
    return Served(**{**usual, **more, **changed})  # type: ignore[arg-type]  # checked where they are used


@pytest.fixture(scope="module")
def plain() -> Subject:
    return make_subject("plain", SIZE)


def contender(subject: Subject, kind: str, chunk: int = 8) -> Contender:
    return Contender(subject, kind, chunk=chunk, vocabulary=SIZE.vocabulary, budget_bytes=None)


# --- arithmetic ---


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3, 1, 2], 50, 2),
        ([4, 1, 2, 3], 50, 2),
        (range(1, 101), 95, 95),
        (range(1, 21), 95, 19),
        ([7], 95, 7),
        ([], 50, 0),
    ],
)
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(
    values: Sequence[int], percent: float, expected: int
) -> None:
    assert percentile(values, percent) == expected


def test_tokens_after_equal_prefixes_count_once() -> None:
    prefixes = Prefixes()
    prefixes.add([1, 2, 3])
    prefixes.add([1, 2, 4, 3])
    prefixes.add([2, 3])
    prefixes.add([1, 2])
    assert len(prefixes) == 3 + 2 + 2
    assert [len(prefixes.path(tokens)) for tokens in ([1, 2, 4], [2, 3, 4], [3], [])] == [3, 2, 0, 0]


def after(*tokens: int) -> Shown:
    """The layers have seen these, whatever was cached."""
    return lambda _: tokens


NOTHING = after()


def test_a_perfect_cache_recomputes_one_token_of_what_it_knows() -> None:
    perfect = Anywhere()
    assert perfect.serve([1, 2, 3], after(1, 2, 3, 7)) == Reuse(0, 0)
    assert perfect.serve([1, 2, 3], after(1, 2, 3, 8)) == Reuse(3, 2)
    assert perfect.serve([1, 2, 3, 7, 5], NOTHING) == Reuse(4, 4)
    assert perfect.serve([1, 2, 3, 8], NOTHING) == Reuse(4, 3)


def test_what_a_cancelled_request_has_shown_begins_with_what_was_cached() -> None:
    perfect = Anywhere()
    perfect.serve([1, 2, 3, 4, 5, 6], after(1, 2))
    assert perfect.serve([1, 2, 3, 4, 5, 6], lambda cached: [1, 2, 3, 4, 5, 6][: cached + 2]) == Reuse(2, 2)
    assert perfect.serve([1, 2, 3, 4, 5, 6], NOTHING) == Reuse(4, 4)


def test_fixed_points_resume_at_the_grid_near_the_end_and_at_ends_only() -> None:
    prompt = list(range(100, 121))  # 21 tokens: points at 8, 16 and 17, and at 23, the end
    points = FixedPoints(every=8, before_end=4)
    assert points.serve(prompt, after(*prompt, 1, 2)) == Reuse(0, 0)
    for length, cached in {7: 0, 8: 8, 15: 8, 16: 16, 17: 17, 20: 17}.items():
        assert points.serve([*prompt[:length], 9], NOTHING) == Reuse(length, cached), length
    assert points.serve(prompt, NOTHING) == Reuse(21, 17)
    assert points.serve([*prompt, 1, 2, 9], NOTHING) == Reuse(23, 23)


def test_a_branch_is_a_point_once_it_was_recomputed() -> None:
    prompt = list(range(100, 120))
    for branches, expected in ((True, 12), (False, 8)):
        points = FixedPoints(every=8, before_end=4, branches=branches)
        points.serve(prompt, after(*prompt))
        branch = [*prompt[:12], 1, 1, 1, 1, 1]
        assert points.serve(branch, after(*branch)) == Reuse(12, 8)
        assert points.serve([*prompt[:12], 2, 2], NOTHING) == Reuse(12, expected)


def test_a_cancelled_prefill_leaves_only_the_points_that_it_reached() -> None:
    prompt = list(range(100, 130))
    points = FixedPoints(every=8, before_end=4)
    points.serve(prompt, after(*prompt[:10]))
    assert points.serve(prompt, NOTHING) == Reuse(10, 10)
    assert points.serve([*prompt[:9], 1], NOTHING) == Reuse(9, 8)


def test_losses_are_what_was_matched_and_not_cached() -> None:
    reuses = [Reuse(0, 0), Reuse(900, 600), Reuse(500, 499), Reuse(256, 0)]
    assert Losses.of([1000, 1000, 500, 500], reuses) == Losses(
        prompt_tokens=3000,
        matched_tokens=1656,
        cached_tokens=1099,
        hit_rate=1099 / 3000,
        lost_tokens=557,
        lost_p50=1,
        lost_p95=300,
        lost_max=300,
        lost_close_share=0.75,
    )


def test_costs_set_what_is_held_against_the_distinct_tokens() -> None:
    requests = [
        served(computed=5, ttft_ms=10.0, ms=20.0, held_bytes=70, peak_bytes=90, shown=[1, 2, 3, 4, 5]),
        served(computed=2, ttft_ms=None, ms=5.0, held_bytes=80, peak_bytes=85, shown=[1, 2, 3, 9]),
        served(computed=1, ttft_ms=30.0, ms=75.0, held_bytes=81, peak_bytes=81, shown=[1, 2, 3]),
    ]
    costs = Costs.of(requests, LayerBytes(per_token=10, per_state=7), mismatches=1)
    assert costs == Costs(
        computed_tokens=8,
        ttft_ms_median=10.0,
        ttft_ms_p95=30.0,
        seconds=0.1,
        held_bytes=81,
        peak_bytes=90,
        distinct_tokens=6,
        distinct_bytes=60,
        held_ratio=1.35,
        held_states=3.0,
        mismatches=1,
    )
    assert Costs.of(requests, LayerBytes(per_token=0, per_state=7), 0).held_ratio is None
    assert Costs.of(requests, LayerBytes(per_token=10, per_state=0), 0).held_states is None


# --- models ---


@pytest.mark.parametrize("kind", KINDS)
def test_layer_bytes_are_those_of_the_shapes(kind: str) -> None:
    subject = make_subject(kind, SIZE)
    keys_and_values = 2 * HEAD * 4  # of one head in one layer, float32
    expected = {
        "plain": (keys_and_values, 0),
        "window": (keys_and_values, None),
        "recurrent": (0, None),
        "hybrid": (keys_and_values, None),
        "mla": ((HEAD + HEAD // 2) * 4, 0),
        "chunk": (keys_and_values, None),
        "quantized": (2 * (HEAD + 4 + 4), 0),
    }
    per_token, per_state = LayerBytes.of(subject)
    assert per_token == expected[kind][0]
    assert per_state > 0 if expected[kind][1] is None else per_state == 0
    if kind == "window":
        assert per_state == WINDOW * keys_and_values
    if kind == "chunk":
        assert 3 * CHUNK // 2 * keys_and_values < per_state < 3 * CHUNK * 3 // 2 * keys_and_values


def test_the_weights_of_a_kind_are_the_same_every_time(plain: Subject) -> None:
    ask = asking(range(FIRST_WORD, 60))
    again = make_subject("plain", SIZE)
    other = make_subject("plain", SIZE, seed=1)
    answers = [contender(subject, "none").serve(ask).answer for subject in (plain, again, other)]
    assert answers[0] == answers[1] != answers[2]


# --- one request ---


def test_a_request_says_what_was_reused_and_what_was_computed(plain: Subject) -> None:
    one = contender(plain, "single")
    prompt = list(range(FIRST_WORD, FIRST_WORD + 20))
    first = one.serve(asking(prompt))
    assert (first.total, first.matched, first.cached, first.computed) == (20, 0, 0, 20)
    assert len(first.answer) == 3
    assert min(first.answer) >= FIRST_WORD
    assert first.shown == [*prompt, *first.answer[:2]]
    assert first.ttft_ms is not None
    assert 0 < first.ttft_ms <= first.ms
    assert first.held_bytes == one.cache.nbytes > 0
    again = one.serve(asking([*prompt[:15], 60, 61]))
    assert (again.total, again.matched, again.cached, again.computed, again.lost) == (17, 15, 15, 2, 0)


def test_a_cancelled_request_ends_within_its_prefill(plain: Subject) -> None:
    one = contender(plain, "single")
    prompt = list(range(FIRST_WORD, FIRST_WORD + 33))
    gone = one.serve(asking(prompt, cancel=0.3))  # after 0.3 x 32 tokens, noticed after the second chunk of 8
    assert (gone.computed, gone.answer, gone.ttft_ms, gone.shown) == (16, [], None, prompt[:16])
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
    exchanges, counts = serve_all(AgentTrace(workload), [Fake(50, turns), Fake(51, turns), Fake(52, turns)])
    assert turns == [50, 51, 52, 51, 52, 50, 52, 50, 51] * 4
    assert sum(counts.values()) >= 12
    prompts = [exchange.ask.prompt for exchange in exchanges]
    assert any(50 in prompt for prompt in prompts)
    assert not any(51 in prompt or 52 in prompt for prompt in prompts)
    answered = [exchange for exchange in exchanges[2:] if exchange.ask.cancel is None]
    assert all([one.answer[0] for one in exchange.served] == [50, 51, 52] for exchange in answered)


@pytest.mark.parametrize("kind", KINDS)
def test_all_caches_give_equal_answers(kind: str) -> None:
    options = Options(workload=SMALL, models=[kind], hidden=128, layers=1, chunk_tokens=32)
    (model,) = measure(options).models
    none, single, trie = model.contenders
    for row in (single, trie):
        assert row.costs is not None
        assert row.costs.mismatches == 0
        assert [one.answer for one in row.served] == [one.answer for one in none.served]
    best = next(row.losses for row in model.rows if row.name == "best possible")
    assert 0 == none.losses.hit_rate < single.losses.hit_rate < trie.losses.hit_rate <= best.hit_rate
    assert none.costs is not None
    assert none.costs.distinct_tokens <= sum(one.total for one in none.served)


def test_a_bound_of_memory_is_kept_and_costs_hits() -> None:
    rates = []
    for budget in (None, 60_000):
        options = Options(
            workload=SMALL,
            models=["plain"],
            caches=["trie"],
            hidden=128,
            layers=1,
            chunk_tokens=32,
            budget_bytes=budget,
        )
        report = measure(options)
        ((row,),) = [model.contenders for model in report.models]
        assert row.costs is not None
        rates.append(row.losses.hit_rate)
        assert (row.costs.held_bytes <= 60_000) == (budget is not None)
        assert report.data()["budget_bytes"] == budget
    assert 0 < rates[1] < rates[0]


# --- the command ---


def test_the_json_has_the_documented_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    assert bench.main(["cache", "--model=plain", "--caches=none,single", f"--json={file}", *TINY]) in exits.MEASURED
    data = json.loads(file.read_text())
    assert set(data) == {"benchmark", "machine", "targets", "workload", "chunk_tokens", "budget_bytes", "models"}
    assert set(data["machine"]) == {"mlx", "device", "BLAS", "python", "system", "cores", "load", "others", "mlx-lm"}
    assert data["workload"]["requests"] == 4
    assert data["workload"]["seed"] == 1
    (model,) = data["models"]
    assert set(model) == {
        "model",
        "parameters",
        "bytes_per_token",
        "bytes_per_state",
        "counts",
        "operations",
        "caches",
        "arithmetic",
    }
    assert set(model["caches"]) == {"none", "single"}
    for found in model["caches"].values():
        assert set(found) == {*Losses._fields, *Costs._fields, "requests"}
        assert {len(values) for values in found["requests"].values()} == {4}
        assert sum(found["requests"]["computed"]) == found["computed_tokens"]
    assert set(model["arithmetic"]["best possible"]) == set(Losses._fields)
    assert len(model["operations"]) == 4
    table = capsys.readouterr().out
    assert "seed 1" in table
    assert "BLAS" in table
    assert max(map(len, table.splitlines()[1:])) <= 132


def test_json_on_standard_output_is_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["cache", "--model=mla", "--caches=none", "--json=-", "--seed=7", *TINY]) in exits.MEASURED
    shown = capsys.readouterr()
    assert json.loads(shown.out)["workload"]["seed"] == 7
    assert "hit %" in shown.err


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="not installed; scripts/bench --plot installs it")
    options = Options(workload=SMALL, models=["plain", "recurrent"], caches=["none", "single"], hidden=128, layers=1)
    file = tmp_path / "found.png"
    measure(options).plot(file)
    head = file.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(struct.unpack(">II", head[16:])) > 500


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["cache", "--caches=none,lru"], "'lru' is none of trie, single, none"),
        (["cache", "--model=rnn"], "invalid choice: 'rnn'"),
        (["cache", "--agents=0"], "a workload has at least one"),
        (["cache", "--hidden=100"], "a multiple of 128"),
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


def test_every_benchmark_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name, benchmark in bench.BENCHMARKS.items():
        with pytest.raises(SystemExit, match="0"):
            bench.main([name, "--help"])
        shown = capsys.readouterr().out
        assert "--plot" in shown
        assert f"scripts/bench {name}" in shown.splitlines()[0]
        assert benchmark.summary
