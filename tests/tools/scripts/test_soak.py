"""The soak: a minute of it here, ten with --all; and each of its checks finds what it is there for."""

import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from scripts.tools.host.lib import Answer, Client, Completion, Logprob, TokenLogprob
from scripts.tools.soak.checker import TOLERANCE, Checker, difference
from scripts.tools.soak.clients import Tally
from scripts.tools.soak.main import Plan, soak
from scripts.tools.soak.meter import Trend
from scripts.tools.soak.subject import TINY_LIMITS
from scripts.tools.soak.verdict import Soaked

MIB = 1 << 20


def silent(text: str) -> None:
    pass


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(1), id="1-minute"),
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
import runner.server.app as app, runner.server.response as answer
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


def completion(*tokens: str, logprob: float = -1.0, gap: float = 1.0, reason: int = 1) -> Completion:
    """An answer of these tokens, each with a logprob and a second choice."""
    made = Completion(text="".join(tokens))
    for token in tokens:
        top = (TokenLogprob(token, logprob), TokenLogprob("other", logprob - gap))
        made.answers.append(Answer(content=token, logprobs=(Logprob(token, logprob, top),)))
    made.answers.append(Answer(done=True, done_reason=reason, eval_count=len(tokens), prompt_eval_count=3))
    return made


@pytest.mark.parametrize(
    ("actual", "found"),
    [
        (completion("a", "b"), ""),
        (completion("a", "b", logprob=-1.0 + TOLERANCE / 2), ""),
        (completion("a", "b", logprob=-1.0 + TOLERANCE * 2), "logprob -0.996"),
        (completion("a", "x"), "token 1: 'x' instead of 'b'"),
        (completion("a"), "1 tokens instead of 2"),
        (completion("a", "b", reason=0), r"reason and counts \(0"),
    ],
)
def test_a_difference_is_told(actual: Completion, found: str) -> None:
    told = difference(actual, completion("a", "b"), drawn=False)
    assert bool(told) == bool(found)
    assert re.search(found, told)


def good() -> Soaked:
    checker = Checker(Client.__new__(Client))
    checker.checked = 900
    return Soaked(
        cache="trie",
        concurrent=True,
        tally=Tally(Counter(chat=1000), 1000, 500_000, 400_000, [(at, at + 1.5) for at in range(1000)]),
        checker=checker,
        latencies=[0.002] * 1200,
        own=[0.002] * 1200,
        rss=Trend(70.0 * MIB, 72.0 * MIB, 400),
        memory=Trend(2.0 * MIB, 2.0 * MIB, 400),
        most_memory=3 * MIB,
        weights=MIB,
        limits=TINY_LIMITS,
        budget=None,
        peak=None,
        descriptors=(8, 8),
        captured="",
        faults=[],
        exit_s=0.1,
    )


def with_checker(**changes: object) -> Callable[[Soaked], Soaked]:
    def change(soaked: Soaked) -> Soaked:
        for name, value in changes.items():
            setattr(soaked.checker, name, value)
        return soaked

    return change


def with_tally(**changes: object) -> Callable[[Soaked], Soaked]:
    return lambda soaked: replace(soaked, tally=replace(soaked.tally, **changes))  # type: ignore[arg-type]  # as named


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (with_checker(wrong=["x"]), "wrong answer: x"),
        (with_checker(ties=5), "5 of 900 answers left the right one at a tie"),
        (with_checker(checked=499), "only 499 of 1000 answers were checked"),
        (with_tally(faults=["chat: no end after 120 s"]), "no end"),
        (
            with_tally(spans=[(0.0, 2.0), *((at, at + 1.0) for at in range(1, 1000))]),
            "only 2 of 1000 answers overlapped",
        ),
        (with_tally(cached_tokens=75_000), "only 15.0% of the prompts came from the cache"),
        (lambda soaked: replace(soaked, own=[0.2] * 4 + [0.002] * 1196), "4 of 1200 status answers took longer"),
        (lambda soaked: replace(soaked, latencies=[0.2] * 700 + [0.002] * 500), "200 ms in the median"),
        (lambda soaked: replace(soaked, latencies=[], own=[]), "no status was answered"),
        (lambda soaked: replace(soaked, rss=Trend(70.0 * MIB, 78.0 * MIB, 400)), "resident memory grew"),
        (lambda soaked: replace(soaked, memory=Trend(2.0 * MIB, 10.0 * MIB, 400)), "MLX's memory grew"),
        (lambda soaked: replace(soaked, rss=None), "too few samples of memory for 1000 answers"),
        (
            lambda soaked: replace(soaked, most_memory=2 * MIB + TINY_LIMITS.cache + TINY_LIMITS.workspace),
            "MLX held 7.0 MiB",
        ),
        (lambda soaked: replace(soaked, budget=4 * MIB, peak=43 * MIB // 10), "MLX held 4.3 MiB where 4.0 MiB were"),
        (lambda soaked: replace(soaked, budget=2 * MIB, peak=MIB), "MLX held 3.0 MiB where 2.0 MiB were allowed"),
        (lambda soaked: replace(soaked, descriptors=(8, 11)), "11 descriptors are open where there were 8"),
        (lambda soaked: replace(soaked, descriptors=(8, None)), "None descriptors are open where there were 8"),
        (lambda soaked: replace(soaked, captured="Error: x"), "a host would take this for an error"),
        (lambda soaked: replace(soaked, faults=["status: timeout"]), "status: timeout"),
        (lambda soaked: replace(soaked, exit_s=None), "had not ended 5 s after the signal"),
    ],
)
def test_each_failure_is_told(change: Callable[[Soaked], Soaked], text: str) -> None:
    bad = change(good())
    (failure,) = bad.failures
    assert text in failure
    assert bad.table()
