"""The soak: half a minute of it here, ten minutes with --all; and it finds out a bad runner."""

import sys

import pytest

from scripts.tools.soak.main import Plan, soak


def silent(text: str) -> None:
    pass


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(0.5), id="half a minute"),
        pytest.param(Plan(10, kind="qwen3_next", seed=1), id="10-minutes", marks=pytest.mark.slow),
        pytest.param(Plan(2, kind="gemma3_text", cache="single", seed=2), id="single", marks=pytest.mark.slow),
        pytest.param(Plan(2, kind="qwen3_next", memory="+64MiB", seed=3), id="64 MiB", marks=pytest.mark.slow),
    ],
)
def test_nothing_goes_wrong(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    soaked = soak(plan, silent)
    with capsys.disabled():
        sys.stdout.write(f"\n{soaked.table()}\n")
    assert soaked.failures == []
    assert set(soaked.tally.done) >= {"chat", "branch", "cancel", "retry", "tokenize", "refused"}


def runner_after(code: str) -> list[str]:
    """Our runner, in a process in which this code has run before."""
    return [sys.executable, "-c", f"{code}\nimport runpy; runpy.run_module('runner', run_name='__main__')"]


FAULTS = """
import itertools, time
import mlx.core as mx
import runner.server.routes as app, runner.server.completion as answer
load, final_line, status_body, count, kept = mx.load, answer.final_line, app.status_body, itertools.count(), []
mx.load = lambda *words, **options: {name: 1.01 * array for name, array in load(*words, **options).items()}
answer.final_line = lambda *words: kept.append(b"x" * 400_000) or final_line(*words)
app.status_body = lambda *words: time.sleep(0.12 * (next(count) % 5 == 0)) or status_body(*words)
"""
"""Weights one percent larger give seldom another token, but other logprobs; a leak with every answer; a slow status."""


def test_a_bad_runner_is_found_out() -> None:
    """And its cache has no bound that matters."""
    command = ["env", "MLX_RUNNER_CACHE_MEMORY=1GiB", *runner_after(FAULTS)]
    failures = "\n".join(soak(Plan(0.4, kind="llama", command=command), silent).failures)
    for finding in ("wrong answer", "resident memory grew", "status answers took longer", "MLX held"):
        assert finding in failures
