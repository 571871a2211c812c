"""The soak: a minute of it here, ten with --all; and each of its checks finds what it is there for."""

import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from scripts.soak import BUDGET_BYTES, EndedError, Plan, Soaked, soak
from scripts.soak_checker import TIE, TOLERANCE, Checker, difference
from scripts.soak_clients import Tally
from scripts.soak_meter import Trend
from tests.host import Answer, Client, Completion, Logprob, TokenLogprob

MIB = 1 << 20


def silent(text: str) -> None:
    pass


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(1), id="1-minute"),
        pytest.param(Plan(10, kind="qwen3_next", seed=1), id="10-minutes", marks=pytest.mark.slow),
        pytest.param(Plan(2, kind="gemma3_text", cache="single", seed=2), id="single", marks=pytest.mark.slow),
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
    return [sys.executable, "-c", f"{code}; import runpy; runpy.run_module('runner', run_name='__main__')"]


def test_another_models_answers_are_found() -> None:
    """Weights that are one percent larger: seldom another token, but other logprobs."""
    larger = (
        "import mlx.core as mx; load = mx.load;"
        "mx.load = lambda *words, **options: {name: 1.01 * array for name, array in load(*words, **options).items()}"
    )
    soaked = soak(Plan(0.15, kind="llama", command=runner_after(larger)), silent)
    assert any("wrong answer" in failure for failure in soaked.failures)


def test_a_runner_that_ends_is_found() -> None:
    with pytest.raises(EndedError, match=r"exit status -14"):
        soak(Plan(0.5, command=runner_after("import signal; signal.alarm(4)")), silent)


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


def test_a_tie_is_no_fault() -> None:
    near = completion("a", "b", gap=TOLERANCE / 2)
    assert difference(completion("a", "x"), near, drawn=False) == TIE
    assert difference(completion("a", "x"), completion("a", "b"), drawn=True) == TIE


def good() -> Soaked:
    checker = Checker(Client.__new__(Client))
    checker.checked = 900
    return Soaked(
        plan=Plan(1),
        tally=Tally(Counter(chat=1000), 1000, 500_000, 400_000),
        checker=checker,
        latencies=[0.002] * 1200,
        own=[0.002] * 1200,
        rss=Trend(70.0 * MIB, 72.0 * MIB, 1.0 * MIB),
        memory=Trend(5.0 * MIB, 5.0 * MIB, 0.0),
        most_memory=6 * MIB,
        weights=MIB,
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


def test_a_good_soak_has_no_failures_and_a_table() -> None:
    soaked = good()
    assert soaked.failures == []
    assert "1000, 900 of them checked, 0 wrong" in soaked.table()
    assert soaked.data()["failures"] == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (with_checker(wrong=["x"]), "wrong answer: x"),
        (with_checker(ties=5), "5 of 900 answers left the right one at a tie"),
        (with_checker(checked=0), "no answer was checked"),
        (with_tally(faults=["chat: no end after 120 s"]), "no end"),
        (with_tally(cached_tokens=0), "nothing ever came from the cache"),
        (lambda soaked: replace(soaked, own=[0.2] * 4 + [0.002] * 1196), "4 of 1200 status answers took longer"),
        (lambda soaked: replace(soaked, rss=Trend(70.0 * MIB, 90.0 * MIB, 10.0 * MIB)), "resident memory grew"),
        (lambda soaked: replace(soaked, most_memory=MIB + BUDGET_BYTES + 65 * MIB), "MLX held 70.0 MiB"),
        (lambda soaked: replace(soaked, memory=Trend(5.0 * MIB, 10.0 * MIB, 1.0)), "MLX's memory grew"),
        (lambda soaked: replace(soaked, descriptors=(8, 9)), "9 descriptors are open where there were 8"),
        (lambda soaked: replace(soaked, captured="Error: x"), "a host would take this for an error"),
        (lambda soaked: replace(soaked, faults=["status: timeout"]), "status: timeout"),
    ],
)
def test_each_failure_is_told(change: Callable[[Soaked], Soaked], text: str) -> None:
    (failure,) = change(good()).failures
    assert text in failure


def test_a_trend_leaves_out_the_warm_up() -> None:
    samples = [(float(second), 100.0 if second >= 20 else second * 5.0) for second in range(61)]
    assert Trend.of(samples) == Trend(100.0, 100.0, 0.0)
    leaking = Trend.of([(float(second), second * 1.0) for second in range(61)])
    assert leaking.per_minute == pytest.approx(60, rel=0.1)
