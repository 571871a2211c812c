"""Several requests sampled together: every row draws the tokens and log-probabilities that it would draw alone.

They agree to the last bit, for any other rows, joining and leaving at any time.
"""

import random
from pathlib import Path

import mlx.core as mx
import pytest

from runner.sampling import SamplingOptions, filters
from runner.sampling.sample import Choice, SampledTokens, log_probabilities
from runner.sampling.sampler import Sampler, SamplerBatch
from tests.unit.sampling.test_sampler import EVERYTHING, operations

CONTEXT = 400
TYPICAL = SamplingOptions(
    temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, repeat_penalty=1.1, presence_penalty=0.1, repeat_last_n=7, seed=5
)


def wishes(rng: random.Random) -> SamplingOptions:
    """Generates options of few kinds, so that rows share computations, with many values within a kind."""
    return SamplingOptions(
        temperature=rng.choice([0, 0.3, 0.8, 2.5]),
        top_k=rng.choice([0, 40]),
        top_p=rng.choice([0, 0.3, 0.9, 0.99]),
        min_p=rng.choice([0, 0, 0.05]),
        repeat_penalty=rng.choice([0, 1.1, 1.3, 0.8]),
        presence_penalty=rng.choice([0, 0, 0.5]),
        frequency_penalty=rng.choice([0, 0, -0.3, 0.4]),
        repeat_last_n=rng.choice([0, 5, 5, -1, 70]),
        seed=rng.randrange(1 << 64),
        logprobs=rng.random() < 0.4,
        top_logprobs=rng.randrange(0, 21),
    )


class Asking:
    """A request with options, a prompt and the logits of each of its steps."""

    def __init__(self, rng: random.Random, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.options = wishes(rng)
        self.prompt = [rng.randrange(-1, vocabulary + 2) for _ in range(rng.randrange(100))]
        self.steps = 0  # that its sampler has done in batches or alone
        self._key = rng.randrange(1 << 30)

    def sampler(self) -> Sampler:
        return Sampler(self.options, self.prompt, self.vocabulary, CONTEXT)

    def logits(self, step: int) -> mx.array:
        """[1, V]"""
        return mx.random.normal((1, self.vocabulary), key=mx.random.key(self._key + step)) * 3

    def next_logits(self) -> mx.array:
        self.steps += 1
        return self.logits(self.steps - 1)

    def alone(self, steps: int) -> list[Choice]:
        """Returns the results of sampling it alone."""
        sampler = self.sampler()
        return [sampler(self.logits(step)).read()[0] for step in range(steps)]


class Journey:
    """Requests that arrive, decode alone or in changing batches, and leave.

    Samples stay in flight for up to three steps, and are split and joined with others meanwhile.
    """

    def __init__(self, seed: int, vocabulary: int) -> None:
        self._rng = random.Random(seed)
        self._vocabulary = vocabulary
        self._running: dict[Asking, Sampler] = {}
        self._in_flight: list[tuple[list[Asking], SampledTokens]] = []
        self.drawn: dict[Asking, list[Choice]] = {}

    def leg(self) -> None:
        """Lets some requests come, leave or pause; the others decode in one batch for a while."""
        rng = self._rng
        for one in rng.sample([*self._running], rng.randint(0, len(self._running))):
            if rng.random() < 0.3:
                del self._running[one]
        for _ in range(rng.randint(0, min(3, 8 - len(self._running)))):
            one = Asking(rng, self._vocabulary)
            self._running[one] = one.sampler()
            self.drawn[one] = []
        members = rng.sample([*self._running], rng.randint(0, len(self._running)))
        if not members:
            return
        samplers = [self._running[one] for one in members]
        batch = SamplerBatch(samplers) if len(members) > 1 or rng.random() < 0.5 else None
        for _ in range(rng.choice([0, 1, 2, 3, 10, 70])):
            logits = mx.concatenate([one.next_logits() for one in members])
            sample = batch(logits) if batch else samplers[0](logits)
            self._dispatch(members, sample)
        if batch:
            batch.release()

    def _dispatch(self, members: list[Asking], sample: SampledTokens) -> None:
        rng = self._rng
        if len(members) > 1 and rng.random() < 0.3:
            order = rng.sample(range(len(members)), len(members))
            cut = rng.randint(1, len(order) - 1)
            parts = [(part, sample.take(part)) for part in (order[:cut], order[cut:])]
            self._in_flight += [([members[row] for row in part], taken) for part, taken in parts]
        else:
            self._in_flight.append((members, sample))
        if len(self._in_flight) > 1 and rng.random() < 0.3:
            (first, one), (second, other) = self._in_flight[-2:]
            self._in_flight[-2:] = [([*first, *second], SampledTokens.joined([one, other]))]
        if rng.random() < 0.5:
            mx.async_eval(self._in_flight[-1][1].arrays())
        while len(self._in_flight) > 3:
            self._read()

    def _read(self) -> None:
        members, sample = self._in_flight.pop(0)
        for one, choice in zip(members, sample.read(), strict=True):
            self.drawn[one].append(choice)

    def finish(self) -> None:
        while self._in_flight:
            self._read()


@pytest.mark.parametrize(
    ("seed", "vocabulary", "legs"),
    [
        *((seed, 64, 12) for seed in range(3)),
        *((seed, 1000, 8) for seed in (0, 2)),
        (3, 20011, 5),
        *(pytest.param(seed, 64, 60, marks=pytest.mark.slow) for seed in range(100, 108)),
    ],
)
def test_a_row_draws_in_any_mix_what_it_draws_alone(seed: int, vocabulary: int, legs: int) -> None:
    trip = Journey(seed, vocabulary)
    for _ in range(legs):
        trip.leg()
    trip.finish()
    assert sum(one.steps for one in trip.drawn) > legs
    for one, drawn in trip.drawn.items():
        assert drawn == one.alone(one.steps), one.options


def test_the_options_of_an_unseeded_sampler_make_it_again() -> None:
    logits = mx.zeros((1, 1000))
    sampler = Sampler(SamplingOptions(temperature=1), [], 1000, CONTEXT)
    again = Sampler(sampler.options, [], 1000, CONTEXT)
    assert [again(logits).read() for _ in range(8)] == [sampler(logits).read() for _ in range(8)]


def test_a_sampler_whose_row_is_in_a_batch_draws_nothing() -> None:
    sampler, other = (Sampler(TYPICAL, [1], 64, CONTEXT) for _ in range(2))
    batch = SamplerBatch([sampler, other])
    for use in (lambda: sampler(mx.zeros((1, 64))), lambda: SamplerBatch([sampler]), lambda: sampler.skip([1])):
        with pytest.raises(RuntimeError, match="in a batch"):
            use()
    batch.release()
    assert len(sampler(mx.zeros((1, 64))).read()) == 1


def test_the_operations_of_a_step_do_not_grow_with_the_rows(tmp_path: Path) -> None:
    sizes = {}
    for rows in (2, 8):
        batch = SamplerBatch([Sampler(EVERYTHING, [1, 2, 3], 64, CONTEXT) for _ in range(rows)])
        sizes[rows] = operations(batch, rows, 80, tmp_path / "graph.dot")[10:]  # the first ones join the states
    assert sizes[2] == sizes[8]


@pytest.mark.parametrize(("vocabulary", "rows"), [(1 << 16, 8), (1 << 11, 2)])
def test_a_sampler_that_has_left_keeps_only_its_own_row(vocabulary: int, rows: int) -> None:
    row_bytes = vocabulary * 4
    options = SamplingOptions(temperature=1, presence_penalty=0.5, repeat_last_n=20, seed=1)
    mx.synchronize()
    mx.clear_cache()  # MLX would reuse buffers of other tests, which may be nearly twice as large
    before = mx.get_active_memory()
    samplers = [Sampler(options, [1, 2, 3], vocabulary, CONTEXT) for _ in range(rows)]
    batch = SamplerBatch(samplers)
    for _ in range(30):
        mx.eval(batch(mx.zeros((rows, vocabulary))).arrays())
    batch.release()
    survivor = samplers[1]
    del samplers, batch
    mx.synchronize()
    assert row_bytes <= mx.get_active_memory() - before < row_bytes + 4096
    assert len(survivor(mx.zeros((1, vocabulary))).read()) == 1


def test_log_probabilities_are_computed_only_for_rows_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    compute = log_probabilities

    def watched(logits: mx.array) -> mx.array:
        computed.append(logits.shape[0])
        return compute(logits)

    monkeypatch.setattr("runner.sampling.sample.log_probabilities", watched)
    asking = SamplingOptions(logprobs=True, top_logprobs=2)
    for options in ([SamplingOptions()] * 3, [SamplingOptions(), asking, TYPICAL, asking], [asking] * 2):
        batch = SamplerBatch([Sampler(wish, [], 64, CONTEXT) for wish in options])
        sample = batch(mx.zeros((len(options), 64)))
        assert [len(choice.top) for choice in sample.read()] == [wish.top_logprobs for wish in options]
        assert [array.shape for array in sample.arrays()[1:]] in ([], [(2,), (2, 2), (2, 2)])
    assert computed == [2, 2]


def test_the_whole_vocabulary_is_ranked_only_for_rows_with_top_p(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked = []
    rank = filters.TopP.__call__

    def watched(self: filters.TopP, weights: mx.array) -> mx.array:
        ranked.append(weights.shape)
        return rank(self, weights)

    monkeypatch.setattr(filters.TopP, "__call__", watched)
    plain, wanting = SamplingOptions(temperature=1), SamplingOptions(temperature=1, top_p=0.5)
    for options in ([plain] * 3, [plain, wanting, plain, wanting], [plain, TYPICAL]):
        SamplerBatch([Sampler(wish, [], 64, CONTEXT) for wish in options])(mx.zeros((len(options), 64))).read()
    assert ranked == [(2, 64), (1, 40)]
