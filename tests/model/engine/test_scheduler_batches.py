"""Answers that decode in one batch or alone: rows join and leave, and no answer changes."""

from collections.abc import Callable
from itertools import pairwise

import mlx.core as mx
import pytest

from runner.cache.layers.trial import BatchTrial
from runner.engine.batches import BatchMatcher
from runner.engine.policy import SlicePolicy
from runner.engine.trial import SettledTrial
from runner.sampling import SamplingOptions
from scripts.tools.models.tiny import KINDS, VOCAB, tiny, words
from tests.lib.tiny_engine import BATCHABLE, RequestSpec, TinyEngine, plain_forward

requests = pytest.mark.parametrize("name", KINDS)
batchable = pytest.mark.parametrize("name", BATCHABLE)

SAMPLING = [
    SamplingOptions(),
    SamplingOptions(temperature=0.8, seed=1),
    SamplingOptions(temperature=1.2, seed=2, top_k=10, repeat_penalty=1.3, repeat_last_n=8),
    SamplingOptions(logprobs=True, top_logprobs=3),
    SamplingOptions(temperature=0.9, seed=4, top_p=0.7, logprobs=True),
    SamplingOptions(presence_penalty=0.6, frequency_penalty=0.2, repeat_last_n=-1),
    SamplingOptions(temperature=0.7, seed=6, min_p=0.2, top_k=30),
    SamplingOptions(temperature=1.0, seed=7, top_k=10, logprobs=True, top_logprobs=2),
]


@requests
def test_eight_answers_of_every_sort_are_what_each_is_alone(name: str) -> None:
    engine = TinyEngine(name)
    for number, options in enumerate(SAMPLING):
        engine.submit(RequestSpec(tuple(words(20 + 5 * number, 3 * number + 1)), 15 + number, options))
    engine.finish()
    engine.check()
    assert engine.forward.most_rows == (8 if name in BATCHABLE else 1)


@batchable
def test_as_many_decode_in_one_forward_as_are_there(name: str) -> None:
    engine = TinyEngine(name)
    asked = [engine.ask(words(20 + 9 * number, number), 16 + 8 * number) for number in range(4)]
    engine.until(lambda: all(engine.phase(each) == "batch" for each in asked))
    engine.forward.calls.clear()
    engine.finish()
    engine.check()
    rows = [count for count, _ in engine.forward.calls]
    assert rows == sorted(rows, reverse=True)
    assert set(rows) == {1, 2, 3, 4}
    assert len(rows) <= 40  # a step is one forward, whoever takes part in it


def test_an_answer_joins_others_after_a_few_steps_alone() -> None:
    """Joining copies the layers of a row, which does not pay for very short answers."""
    engine = TinyEngine("llama")
    engine.scheduler.matcher.lone_steps = BatchMatcher(SettledTrial()).lone_steps
    for tokens, rows in ((4, 1), (30, 3)):
        for number in range(3):
            engine.ask(words(20, number), tokens)
        engine.finish()
        assert engine.forward.most_rows == rows
    engine.check()


class Wrong:
    """A model that gives the second of two rows the logits of the first."""

    def __init__(self, name: str) -> None:
        self._model = plain_forward(TinyEngine(name).kind)
        self.batches = 0

    def __call__(self, tokens: mx.array, layers: list[object]) -> mx.array:
        logits = self._model(tokens, layers)
        self.batches += tokens.shape[0] > 1
        return mx.broadcast_to(logits[:1], logits.shape)


class Counted:
    """A trial that counts its slices, and the steps of answers before each of them."""

    def __init__(self, name: str, forward: Callable[[mx.array, list[object]], mx.array]) -> None:
        self._trial = BatchTrial(tiny(name).make_layers, forward, VOCAB)
        self.slices = 0
        self.engine: TinyEngine | None = None
        self.rounds: list[int] = []
        """Before each slice, how many steps the group that has made the fewest of them has made."""

    @property
    def fault(self) -> str | None:
        return self._trial.fault

    def advance(self) -> None:
        self.slices += 1
        if self.engine is not None:
            self.rounds.append(min(group.steps for group in self.engine.scheduler.batches.all))
        self._trial.advance()


@batchable
def test_a_model_whose_rows_disturb_each_other_takes_turns(name: str) -> None:
    wrong = Wrong(name)
    trial = Counted(name, wrong)
    engine = TinyEngine(name, trial=trial)
    engine.ask(words(30), 2)
    engine.finish()
    assert not trial.slices, "nobody wanted to know yet"
    for number in range(4):
        engine.ask(words(30, number), 30)
    engine.finish()
    engine.check()
    assert engine.forward.most_rows == 1
    assert trial.fault
    assert wrong.batches


def test_answers_go_on_while_batches_are_tried() -> None:
    """If the gap leaves no room, one slice of the trial follows every round of steps."""
    trial = Counted("llama", plain_forward(tiny("llama")))
    engine = TinyEngine("llama", SlicePolicy(2048, 0.0), trial=trial)
    trial.engine = engine
    for number in range(3):
        engine.ask(words(30, number), 60)
    engine.finish()
    engine.check()
    assert engine.forward.most_rows == 3
    assert trial.slices > 10
    assert all(before < after for before, after in pairwise(trial.rounds))
