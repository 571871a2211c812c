"""Tokens drawn ahead of drafts are those that would be drawn one by one, whatever the drafts are."""

import itertools
import random
from typing import cast

import mlx.core as mx
import pytest

from runner.sampling import SamplingOptions
from runner.sampling.sample import Choice
from runner.sampling.sampler import Sampler, preview_draws

VOCABULARY, CONTEXT = 300, 512
OPTIONS = {
    "greedy": SamplingOptions(),
    "drawn": SamplingOptions(temperature=0.8, seed=5),
    "filtered": SamplingOptions(temperature=1.1, seed=6, top_k=40, top_p=0.9, min_p=0.02),
    "nucleus": SamplingOptions(temperature=1.0, seed=7, top_p=0.8),
    "penalties": SamplingOptions(
        temperature=0.9, seed=8, repeat_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.4, repeat_last_n=6
    ),
    "penalties of all": SamplingOptions(repeat_penalty=0.7, frequency_penalty=0.3, repeat_last_n=-1),
    "log-probabilities": SamplingOptions(temperature=0.7, seed=9, logprobs=True, top_logprobs=3, repeat_penalty=1.2),
}
PROMPT = [3, 7, 7, 290, 1000, -1, 12]


class Text:
    """Logits that depend on the last token and its place, so that a wrong token leads elsewhere."""

    def __init__(self, seed: int) -> None:
        self._table = mx.random.normal((64, VOCABULARY), key=mx.random.key(seed)) * 3

    def after(self, place: int, token: int) -> mx.array:
        """Returns the logits [1, V]."""
        return self._table[(31 * place + token) % 64][None]


def one_by_one(options: SamplingOptions, text: Text, count: int) -> list[Choice]:
    sampler, found, token = Sampler(options, PROMPT, VOCABULARY, CONTEXT), [], PROMPT[-1]
    for place in range(count):
        choice = sampler(text.after(place, token)).read()[0]
        found.append(choice)
        token = choice.token
    return found


@pytest.mark.parametrize("right", [0.5, 1.0])
@pytest.mark.parametrize("name", OPTIONS)
def test_rounds_with_drafts_give_the_same_answer(name: str, right: float) -> None:
    options, text, numbers = OPTIONS[name], Text(1), random.Random(2)
    wanted = one_by_one(options, text, 80)
    sampler, found, token = Sampler(options, PROMPT, VOCABULARY, CONTEXT), list[Choice](), PROMPT[-1]
    while len(found) < len(wanted):
        at, most = len(found), numbers.randint(0, 7)
        drafts = [
            choice.token if numbers.random() < right else numbers.randrange(VOCABULARY)
            for choice in wanted[at : at + most]
        ]
        rows = [text.after(at + row, each) for row, each in enumerate([token, *drafts])]
        if len(rows) == 1 and numbers.random() < 0.5:  # a plain step in between
            taken = sampler(rows[0]).read()
        else:
            drawn = sampler.draw_ahead(mx.concatenate(rows), drafts).read()
            same = itertools.takewhile(lambda pair: pair[0].token == pair[1], zip(drawn, drafts, strict=False))
            taken = drawn[: 1 + sum(1 for _ in same)]
            sampler.skip([choice.token for choice in taken])
        found += taken
        token = found[-1].token
    assert [choice.token for choice in found[: len(wanted)]] == [choice.token for choice in wanted]
    for one, other in zip(found, wanted, strict=False):
        assert one.top == other.top
        assert one.logprob == other.logprob


def test_previews_draw_what_comes_next_and_change_nothing() -> None:
    """For several samplers at once, whose options are of several kinds."""
    texts = [Text(seed) for seed in range(len(OPTIONS))]
    pairs = zip(OPTIONS.values(), texts, strict=True)
    wanted = [[each.token for each in one_by_one(options, text, 70)] for options, text in pairs]
    samplers = [Sampler(options, PROMPT, VOCABULARY, CONTEXT) for options in OPTIONS.values()]
    tokens = [PROMPT[-1]] * len(texts)
    for place in range(66):
        draw, ahead = preview_draws(samplers), tokens
        for later in range(place, place + 4):
            logits = [text.after(later, token) for text, token in zip(texts, ahead, strict=True)]
            ahead = cast("list[int]", draw(mx.concatenate(logits)).tolist())
            assert ahead == [answer[later] for answer in wanted]
        steps = zip(samplers, texts, tokens, strict=True)
        tokens = [sampler(text.after(place, token)).read()[0].token for sampler, text, token in steps]
