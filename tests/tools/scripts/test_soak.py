"""The soak: a minute of it here, ten with --all; and each of its checks finds what it is there for."""

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.tools.host.lib import Answer, Client, Completion, Logprob, Reply, Request, StreamError, TokenLogprob
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level, write_tokenizer
from scripts.tools.real import chat
from scripts.tools.soak.checker import TIE, TOLERANCE, Checker, difference
from scripts.tools.soak.clients import Tally
from scripts.tools.soak.main import EndedError, Plan, main, soak
from scripts.tools.soak.meter import Scraper, Trend, samples
from scripts.tools.soak.rank_logs import rank_faults
from scripts.tools.soak.subject import TINY_LIMITS, real_subject
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
        pytest.param(Plan(3, kind="llama", clients=4, ranks=2, seed=4), id="2 ranks", marks=pytest.mark.slow),
    ],
)
def test_nothing_goes_wrong(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    soaked = soak(plan, silent)
    with capsys.disabled():
        sys.stdout.write(f"\n{soaked.table()}\n")
    assert soaked.failures == []
    assert soaked.scrapes > 10
    assert set(soaked.tally.done) >= {"chat", "branch", "cancel", "retry", "tokenize", "refused"}


def test_a_real_model_and_a_kind_exclude_each_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--kind", "llama", "--real"], ["--real", "--kind", "llama"]):
        monkeypatch.setattr(sys, "argv", ["soak", "1", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert re.search("argument --(real|kind): not allowed with argument --(real|kind)", capsys.readouterr().err)


def test_a_real_model_is_linked_and_left_as_it_is(tmp_path: Path) -> None:
    """Of the tokens only text may be drawn, and the one that ends an answer."""
    model, directory = tmp_path / "model", tmp_path / "soak"
    model.mkdir()
    directory.mkdir()
    write_tokenizer(model, byte_level(ALL_BYTES, (chat.BEGIN, chat.END)))
    for name, text in {"model.safetensors": "weights", "generation_config.json": '{"eos_token_id": 257}'}.items():
        (model / name).write_text(text)
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    subject = real_subject(directory, model)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    assert (subject.model, subject.models_dir) == (str(directory), None)
    assert (directory / "model.safetensors").resolve() == model / "model.safetensors"
    config = json.loads((directory / "generation_config.json").read_text())
    assert config == {"eos_token_id": 257, "suppress_tokens": [*range(128, 256), 256]}
    prompt = subject.write("Be brief.", ["Hello", "Hi", "Bye"])
    assert prompt == chat.render([("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi"), ("user", "Bye")])


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


ENDS = """
import os, signal
import runner.server.response as answer
answer.final_line = lambda *_: os.kill(os.getpid(), signal.SIGALRM)
"""
"""With its first answer, however long the start takes."""


def test_a_runner_that_ends_is_found() -> None:
    with pytest.raises(EndedError, match=r"^the runner ended with exit status -14"):
        soak(Plan(2, command=runner_after(ENDS)), silent)


def test_ranks_that_tell_different_counts_are_found() -> None:
    own = ["msg=completion request=1 cached=4 left=0", "msg=completion request=2 cached=9 left=1"]
    same = [f"{line} rank=1" for line in own]
    assert rank_faults([*own, *same], 2) == []
    (other,) = rank_faults([*own, same[0], "msg=completion request=2 cached=8 left=1 rank=1"], 2)
    (missing,) = rank_faults([*own, same[0]], 2)
    assert "ranks 0 and 1 differ in 1 of 2 requests; request 2: {'cached': '9'" in other
    assert missing.endswith(" and None")
    assert len(rank_faults([*own, *same], 3)) == 1


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
        scrapes=60,
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
    soaked.tally.attacks["silence"] += 2
    assert "attacks      silence 2" in soaked.table()
    assert soaked.data()["failures"] == []


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
        (lambda soaked: replace(soaked, descriptors=(8, 18)), "18 descriptors are open where there were 8"),
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
    assert bad.data()["failures"] == [failure]


@pytest.mark.parametrize(
    ("spans", "together"),
    [
        ([], 0),
        ([(0.0, 1.0)], 0),
        ([(0.0, 1.0), (1.0, 2.0)], 0),
        ([(1.0, 3.0), (0.0, 2.0)], 2),
        ([(0.0, 9.0), (1.0, 2.0), (3.0, 4.0), (9.5, 10.0)], 3),
    ],
)
def test_answers_that_were_written_at_once_are_counted(spans: list[tuple[float, float]], together: int) -> None:
    assert Tally(spans=spans).together == together


def test_a_budget_is_kept_to_five_percent_and_then_nothing_else_bounds_memory() -> None:
    soaked = with_checker(checked=250)(replace(good(), budget=100 * MIB, peak=104 * MIB, most_memory=90 * MIB))
    assert soaked.failures == []
    assert "at most 90.0 MiB, 104.0 MiB at its peak, of 100.0 MiB" in soaked.table()


@pytest.mark.parametrize("wanted", ["lots", "+50%", ""])
def test_a_budget_that_is_no_amount_is_refused(wanted: str) -> None:
    with pytest.raises(ValueError, match="amount of memory"):
        soak(Plan(0.1, kind="llama", memory=wanted), silent)


def test_nobody_asks_for_company_where_there_can_be_none() -> None:
    soaked = replace(with_tally(spans=[])(good()), concurrent=False)
    assert soaked.failures == []


def test_a_trend_leaves_out_the_warm_up() -> None:
    assert Trend.of([(answers, min(answers * 5.0, 100.0)) for answers in range(61)]) == Trend(100.0, 100.0, 24.0)
    leaking = Trend.of([(answers, answers * 100.0) for answers in range(61)])
    assert leaking is not None
    assert leaking.growth / leaking.answers == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize("samples", [[], [(0, 1.0)], [(0, 1.0), (9, 2.0)], [(5, 1.0), (5, 2.0)]], ids=len)
def test_of_too_few_samples_there_is_no_trend(samples: list[tuple[int, float]]) -> None:
    assert Trend.of(samples) is None


async def test_an_answer_that_cannot_be_judged_is_a_finding_and_the_others_are_judged() -> None:
    class Gone(Client):
        def __init__(self) -> None: ...

        async def complete(self, request: Request, **_: object) -> Completion:
            if request.prompt == "a":
                raise StreamError("it is gone")
            return completion("b")

    checker = Checker(Gone())
    for prompt in "ab":
        checker.offer(Request(prompt, logprobs=True), completion("b"))
    checking = asyncio.create_task(checker.run())
    await asyncio.wait_for(checker.finish(), 10)
    checking.cancel()
    assert checker.checked == 2
    (wrong,) = checker.wrong
    assert "StreamError: it is gone" in wrong


def scraped(*texts: str, answers: int = 0) -> list[str]:
    scraper = Scraper(Client.__new__(Client))
    for text in texts:
        scraper.take(samples(text))
    scraper.check(answers)
    return scraper.faults


ENDED = 'mlx_runner_requests_total{outcome="done"} 5\nmlx_runner_requests_total{outcome="length"} 2\n'


@pytest.mark.parametrize(
    ("texts", "answers", "found"),
    [
        ([ENDED], 7, ""),
        ([ENDED], 8, "7 answers ended where clients got 8"),
        ([ENDED, ENDED.replace("5", "6")], 7, ""),
        ([ENDED, ENDED.replace("5", "4")], 6, "mlx_runner_requests_total done went from 5 to 4"),
        ([ENDED, ""], 0, "mlx_runner_requests_total done went from 5 to None"),
        (["mlx_runner_cache_nodes 5\n", "mlx_runner_cache_nodes 2\n"], 0, ""),
        (['x_seconds_bucket{le="1"} 3\n', 'x_seconds_bucket{le="1"} 2\n'], 0, "x_seconds_bucket 1 went from 3 to 2"),
        (["mlx_runner_requests_queued 1\n"], 0, "1 requests run or wait"),
    ],
)
def test_metrics_that_go_back_or_do_not_add_up_are_found(texts: list[str], answers: int, found: str) -> None:
    faults = scraped(*texts, answers=answers)
    assert bool(faults) == bool(found)
    assert not found or found in faults[0]


async def test_a_request_whose_client_has_just_gone_may_take_a_moment_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaving(Client):
        def __init__(self, moments: int) -> None:
            self.moments = moments

        async def send(self, *_: object, **__: object) -> Reply:
            self.moments -= 1
            text = f"mlx_runner_requests_running {int(self.moments >= 0)}\n"
            return Reply(200, {}, text.encode())

    monkeypatch.setattr("scripts.tools.soak.meter._LOOK_S", 0.001)
    for moments, scrapes in ((0, 1), (3, 4)):
        scraper = Scraper(Leaving(moments))
        assert await scraper.scrape_last()
        scraper.check(0)
        assert (scraper.faults, scraper.scrapes) == ([], scrapes)
    monkeypatch.setattr("scripts.tools.soak.meter._LEAVING_S", 0.01)
    scraper = Scraper(Leaving(1_000_000))
    assert await scraper.scrape_last()
    scraper.check(0)
    assert scraper.faults == ["metrics: 1 requests run or wait when all clients are gone"]
