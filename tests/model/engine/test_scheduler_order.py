"""The order in which requests begin and step, and the cost of a cancelled request to the others.

Times are made up: a forward takes 10 ms and 1 ms for each token, whatever the number of rows; all else takes none.
"""

import pytest

from runner.engine.policy import Decode, Prefill, Slice, SlicePolicy, Workload
from scripts.tools.models.tiny import KINDS, words
from tests.lib.tiny_engine import BATCHABLE, UNBATCHABLE, ClientRequest, TinyEngine

PHASES = ("queued", "awaiting prefix", "prefilling", "alone", "batch")


def prompts(count: int, length: int = 30) -> list[list[int]]:
    return [words(length, 2 * number + 1) for number in range(count)]


def test_requests_begin_in_the_order_of_arrival_and_are_notified_then() -> None:
    engine = TinyEngine("llama", parallel=2)
    asked = [engine.ask(prompt, 3 + 5 * (number % 3)) for number, prompt in enumerate(prompts(7))]
    begun: list[int] = []
    while not engine.scheduler.idle:
        engine.advance()
        assert engine.running() <= 2
        waiting = [number for number, each in enumerate(asked) if engine.phase(each) == "queued"]
        assert [number for number, each in enumerate(asked) if not each.started] == waiting
        begun += [number for number in range(7) if asked[number].started and number not in begun]
    assert begun == list(range(7))
    engine.check()


@pytest.mark.parametrize("cache", ["single", "none"])
def test_caches_of_one_session_run_one_request_at_a_time(cache: str) -> None:
    engine = TinyEngine("llama", cache=cache)
    asked = [engine.ask(prompt, 5) for prompt in prompts(3)]
    while not engine.scheduler.idle:
        engine.advance()
        assert sum(each.started and each.finished is None for each in asked) <= 1
    engine.check()
    assert engine.forward.most_rows == 1


def brought_to(phase: str) -> tuple[TinyEngine, ClientRequest, list[ClientRequest]]:
    """Runs three requests, and brings one more into the wanted phase."""
    engine = TinyEngine("llama", SlicePolicy(16, 0.1), parallel=3 if phase == "queued" else 8)
    others = [engine.ask(prompt, 60) for prompt in prompts(1 if phase == "alone" else 3, 40)]
    if phase == "alone":  # the one that is there cannot be joined: it reads a prompt of its own
        others.append(engine.ask(words(600, 8), 2))
        one = others.pop(0)
        engine.until(lambda: len(one.tokens) > 5)
        return engine, one, others
    if phase != "awaiting prefix":
        engine.until(lambda: all(len(each.tokens) > 2 for each in others))
        one = engine.ask(words(200, 50), 30)
    else:
        others.append(engine.ask(words(300, 50), 2))
        one = engine.ask([*words(250, 50), 1], 30)
    engine.until(lambda: engine.phase(one) == phase)
    if phase in ("prefilling", "batch"):
        engine.advance(6)
    assert engine.phase(one) == phase
    return engine, one, others


@pytest.mark.parametrize("phase", PHASES)
def test_a_cancel_costs_one_slice_at_most(phase: str) -> None:
    engine, one, others = brought_to(phase)
    calls, tokens, told = len(engine.forward.calls), list(one.tokens), len(one.received)
    one.request.cancel()
    engine.advance()
    assert engine.phase(one) == "gone"
    assert one.started != (phase == "queued")
    assert len(engine.forward.calls) <= calls + 1
    assert (one.tokens, len(one.received)) == (tokens, told)
    assert one.session is None or one.session not in engine.trie.sequences.sessions
    engine.finish()
    engine.check()
    assert all(each.finished for each in others)


@pytest.mark.parametrize(
    ("name", "phase"),
    [(name, phase) for name in KINDS for phase in ("prefilling", "batch" if name in BATCHABLE else "alone")],
)
def test_what_was_computed_is_kept_for_the_retry(name: str, phase: str) -> None:
    engine = TinyEngine(name, SlicePolicy(16, 0.1))
    one = engine.ask(words(70), 40)
    for prompt in prompts(2) if phase == "batch" else ():
        engine.ask(prompt, 35)
    engine.until(lambda: engine.phase(one) == phase)
    engine.advance(3 if phase == "prefilling" else 12)
    assert one.session is not None
    said = one.tokens
    seen = one.session.position if phase == "prefilling" else 70 + len(said)
    one.request.cancel()
    engine.advance()
    again = engine.ask([*words(70), *said, 1, 2], 3)
    engine.finish()
    engine.check()
    assert 0 < seen <= again.cached + 1
    assert again.cached <= seen


@pytest.mark.parametrize("name", UNBATCHABLE)
def test_answers_that_cannot_be_computed_together_take_turns(name: str) -> None:
    engine = TinyEngine(name)
    asked = [engine.ask(prompt, 25) for prompt in prompts(4)]
    engine.until(lambda: all(each.tokens for each in asked))
    ahead = [len(each.tokens) for each in asked]
    while all(each.finished is None for each in asked):
        engine.advance()
        steps = [len(each.tokens) - before for each, before in zip(asked, ahead, strict=True)]
        assert max(steps) - min(steps) <= 1
    engine.finish()
    engine.check()
    assert engine.forward.most_rows == 1


class Noted(SlicePolicy):
    """The slices reported to the policy: the tokens of a prompt slice, 0 for any other, and the duration of each; and
    the batch that made the last step."""

    def __init__(self) -> None:
        super().__init__(64, 0.1)
        self.received: list[tuple[int, float]] = []
        self.stepped = -1

    def took(self, slice: Slice, work: Workload, seconds: float) -> None:  # noqa: A002 - it is the field's word
        if isinstance(slice, Decode):
            self.stepped = work.decoding[slice.index]
        self.received.append((slice.tokens if isinstance(slice, Prefill) else 0, round(seconds, 6)))
        super().took(slice, work, seconds)


def test_the_policy_learns_what_was_really_computed_and_how_long_it_took() -> None:
    notes = Noted()
    engine = TinyEngine("qwen3_next", notes)
    engine.ask(words(200), 1)
    engine.ask([*words(110), *words(20, 5)], 1)  # this one waits until the first has passed where they part
    engine.finish()
    engine.check()
    assert engine.requests[1].cached == 110
    slices = [told for told in notes.received if told[0]]
    assert slices == [(length, round(0.01 + 0.001 * length, 6)) for _, length in engine.forward.calls if length > 1]
    assert (19, 0.029) in slices
    assert sum(seconds for _, seconds in notes.received) == pytest.approx(engine.clock.now)
