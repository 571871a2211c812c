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


def test_drawing_ahead_changes_nothing() -> None:
    for options in OPTIONS.values():
        text, sampler = Text(3), Sampler(options, PROMPT, VOCABULARY, CONTEXT)
        rows = mx.concatenate([text.after(0, token) for token in (1, 2, 3, 4)])
        once, again = (sampler.draw_ahead(rows, [5, 6, 7]).read() for _ in range(2))
        assert once == again
        assert sampler(rows[:1]).read()[0] == once[0]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_preview_draws_what_comes_next_and_changes_nothing(name: str) -> None:
    options, text = OPTIONS[name], Text(1)
    wanted = [choice.token for choice in one_by_one(options, text, 70)]
    sampler, found, token = Sampler(options, PROMPT, VOCABULARY, CONTEXT), list[int](), PROMPT[-1]
    for place in range(len(wanted)):
        draw, ahead = preview_draws([sampler]), token
        for number, right in enumerate(wanted[place : place + 4]):
            drawn = cast("int", draw(text.after(place + number, ahead)).item())
            assert drawn == right
            ahead = drawn
        token = sampler(text.after(place, token)).read()[0].token
        found.append(token)
    assert found == wanted


def test_a_preview_of_several_draws_what_each_of_them_would() -> None:
    """Whatever their options, which are of several kinds."""
    texts = {name: Text(seed) for seed, name in enumerate(OPTIONS)}
    wanted = [[each.token for each in one_by_one(OPTIONS[name], text, 9)] for name, text in texts.items()]
    draw = preview_draws([Sampler(options, PROMPT, VOCABULARY, CONTEXT) for options in OPTIONS.values()])
    tokens = [PROMPT[-1]] * len(texts)
    for place in range(9):
        logits = mx.concatenate([text.after(place, token) for text, token in zip(texts.values(), tokens, strict=True)])
        tokens = cast("list[int]", draw(logits).tolist())
        assert tokens == [answer[place] for answer in wanted]
