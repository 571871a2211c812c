"""A token that a grammar forbids is never drawn; nothing else changes."""

import random
from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import pytest

from runner.sampling import SamplingOptions
from runner.sampling.filters import masked
from runner.sampling.sample import FLOOR
from runner.sampling.sampler import Sampler, SamplerBatch

VOCAB = 77
OPTIONS = (
    SamplingOptions(),
    SamplingOptions(temperature=1.2, seed=3),
    SamplingOptions(temperature=0.8, top_k=5, seed=4),
    SamplingOptions(temperature=2.0, top_p=0.7, min_p=0.02, seed=5),
    SamplingOptions(temperature=1.0, repeat_penalty=1.4, presence_penalty=0.5, repeat_last_n=6, seed=6),
    SamplingOptions(repeat_penalty=0.7, frequency_penalty=-0.5, repeat_last_n=-1),
    SamplingOptions(temperature=1.0, top_k=20, logprobs=True, top_logprobs=4, seed=7),
    SamplingOptions(logprobs=True, top_logprobs=8),
)


def bits(allowed: Sequence[int]) -> bytes:
    mask = bytearray(-(-VOCAB // 8))
    for token in allowed:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)


def logits_of(seed: int, rows: int = 1) -> mx.array:
    return mx.random.normal((rows, VOCAB), scale=4.0, key=mx.random.key(seed))


def sampler(options: SamplingOptions, generated: Sequence[int] = ()) -> Sampler:
    return Sampler(options, [1, 2, 3, 2], VOCAB, 1000, generated)


def test_each_bit_of_a_mask_allows_one_token_and_its_end_none() -> None:
    for mask, allowed in [*((bits([each]), {each}) for each in range(VOCAB)), (b"", set()), (b"\xff", {*range(8)})]:
        allows = mx.isfinite(masked(logits_of(1), [mask]))
        assert allows.tolist() == [[token in allowed for token in range(VOCAB)]]


@pytest.mark.parametrize("options", OPTIONS)
def test_only_allowed_tokens_are_drawn(options: SamplingOptions) -> None:
    numbers, row = random.Random(1), sampler(options)
    for step in range(60):
        allowed = numbers.sample(range(VOCAB), numbers.choice((1, 2, 3, 30)))
        (choice,) = row(logits_of(step), [bits(allowed)]).read()
        assert choice.token in allowed


def test_log_probabilities_are_of_the_tokens_that_are_allowed() -> None:
    options = SamplingOptions(temperature=0.3, repeat_penalty=9, repeat_last_n=4, logprobs=True, top_logprobs=5, seed=1)
    logits, allowed = logits_of(9), [1, 2, 40]
    (choice,) = sampler(options)(logits, [bits(allowed)]).read()
    right = logits[0, mx.array(allowed)] - mx.logsumexp(logits[0, mx.array(allowed)])
    expected = dict(zip(allowed, cast("list[float]", right.tolist()), strict=True))
    assert dict(choice.top) == pytest.approx(expected, abs=1e-5)
    assert choice.logprob == dict(choice.top)[choice.token]


def test_an_allowed_token_is_listed_however_improbable_it_is() -> None:
    logits = mx.zeros((1, VOCAB)).at[0, 5].add(30_000)
    (choice,) = sampler(SamplingOptions(logprobs=True, top_logprobs=4))(logits, [bits([5, 6])]).read()
    assert choice.top == [(5, 0.0), (6, FLOOR)]


def test_rows_of_a_batch_draw_what_they_draw_alone() -> None:
    numbers = random.Random(2)
    alone, together = [[sampler(options) for options in OPTIONS] for _ in range(2)]
    batch = SamplerBatch(together)
    for step in range(30):
        logits = logits_of(step, len(OPTIONS))
        masks = [bits(numbers.sample(range(VOCAB), 5)) if numbers.random() < 0.6 else None for _ in OPTIONS]
        mine = [row(logits[at : at + 1], [masks[at]]).read()[0] for at, row in enumerate(alone)]
        theirs = batch(logits, masks).read()
        assert theirs == mine


@pytest.mark.parametrize("options", OPTIONS)
def test_what_is_drawn_ahead_of_drafts_is_drawn_one_by_one(options: SamplingOptions) -> None:
    numbers, row, logits = random.Random(3), sampler(options), logits_of(8, 4)
    masks = [bits(numbers.sample(range(VOCAB), count)) for count in (5, 1, 3)]
    single = [row(logits[at : at + 1], [mask]).read()[0] for at, mask in enumerate((*masks, None))]
    drafts = [choice.token for choice in single[:-1]]
    assert sampler(options).draw_ahead(logits, drafts, [*masks, None]).read() == single


@pytest.mark.parametrize("count", [1, 64, 200])
@pytest.mark.parametrize("options", OPTIONS)
def test_skipped_tokens_count_as_drawn(options: SamplingOptions, count: int) -> None:
    numbers = random.Random(count)
    skipped = [numbers.randrange(VOCAB) for _ in range(count)]
    jumping = sampler(options)
    drawn = [jumping(logits_of(step)).read()[0].token for step in range(3)]
    jumping.skip(skipped)
    other = sampler(options, [*drawn, *skipped])
    for step in range(10, 20):
        assert jumping(logits_of(step)).read() == other(logits_of(step)).read()
