"""A token that a grammar forbids is never drawn; nothing else changes."""

import random
from collections.abc import Sequence

import mlx.core as mx
import pytest

from runner.sampling import SamplingOptions
from runner.sampling.mask import masked
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


def test_bit_by_bit() -> None:
    scores = logits_of(1)
    for token in range(VOCAB):
        assert mx.isfinite(masked(scores, [bits([token])])).tolist() == [[each == token for each in range(VOCAB)]]


@pytest.mark.parametrize("missing", [b"", b"\xff", b"\xff\xff"])
def test_tokens_beyond_the_mask_are_never_drawn(missing: bytes) -> None:
    result = masked(logits_of(4), [missing])
    assert mx.isfinite(result).tolist() == [[token < 8 * len(missing) for token in range(VOCAB)]]


@pytest.mark.parametrize("options", OPTIONS)
def test_only_allowed_tokens_are_drawn(options: SamplingOptions) -> None:
    numbers, row = random.Random(1), sampler(options)
    for step in range(60):
        allowed = numbers.sample(range(VOCAB), numbers.choice((1, 2, 3, 30)))
        (choice,) = row(logits_of(step), [bits(allowed)]).read()
        assert choice.token in allowed


def test_log_probabilities_are_of_the_raw_logits() -> None:
    options = SamplingOptions(logprobs=True, top_logprobs=3)
    logits = logits_of(9)
    (free,) = sampler(options)(logits).read()
    (choice,) = sampler(options)(logits, [bits([40])]).read()
    right = (logits - mx.logsumexp(logits))[0, 40].item()
    assert choice.token == 40
    assert choice.logprob == pytest.approx(right, abs=1e-5)
    assert choice.top == free.top


def test_rows_of_a_batch_draw_what_they_draw_alone() -> None:
    numbers = random.Random(2)
    alone, together = [[sampler(options) for options in OPTIONS] for _ in range(2)]
    batch = SamplerBatch(together)
    for step in range(30):
        logits = logits_of(step, len(OPTIONS))
        masks = [bits(numbers.sample(range(VOCAB), 5)) if numbers.random() < 0.6 else None for _ in OPTIONS]
        mine = [row(logits[at : at + 1], [masks[at]]).read()[0] for at, row in enumerate(alone)]
        theirs = batch(logits, masks).read()
        assert [choice.token for choice in theirs] == [choice.token for choice in mine]


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
