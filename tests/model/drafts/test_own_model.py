"""A draft model drafts as if it had read nothing but the present text, wherever its layers have been before."""

import random
from collections.abc import Sequence

import mlx.core as mx
import pytest

from runner.drafts.own_model import MOST_TOKENS, WINDOW_TOKENS, Reader
from scripts.tools.models.tiny import VOCAB, tiny, words
from tests.lib.tiny_engine import plain_forward
from tests.lib.told_drafts import DRAFTABLE

KINDS_READ = [kind for kind in DRAFTABLE if kind != "quantized"]
"""Rounding would tip the choices of a quantized one."""


class Counted:
    """The forward of a tiny model, and the tokens of each call."""

    def __init__(self, kind: str) -> None:
        self._forward = plain_forward(tiny(kind))
        self.lengths: list[int] = []

    def __call__(self, tokens: mx.array, layers: list[object]) -> mx.array:
        self.lengths.append(tokens.shape[1])
        return self._forward(tokens, layers)


def reader(kind: str, forward: Counted | None = None) -> Reader:
    made = Reader(tiny(kind).make_layers, forward or Counted(kind), VOCAB)
    made.turn_to([0, 0, 0])
    made.read(1)
    made.reset()  # as when a model is opened
    return made


def greedy(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)


def drafts(made: Reader, text: Sequence[int], most: int = 4, part: int = 7) -> list[int]:
    made.turn_to(text)
    while made.left > part:
        made.read(part)
        made.turn_to(text)
    return made.draft(most, VOCAB, greedy)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS_READ)
def test_drafts_depend_on_the_text_alone(kind: str, seed: int) -> None:
    numbers, used, text = random.Random(seed), reader(kind), words(30, seed)
    for _ in range(25):
        most = numbers.randint(1, 6)
        found = drafts(used, text, most)
        assert found == drafts(reader(kind), text, most)
        assert len(found) == (most if len(text) > 1 else len(found))
        change = numbers.random()
        if change < 0.7:  # some of them were right
            right = numbers.randint(0, most)
            text = [*text, *found[:right], *([numbers.randrange(VOCAB)] * numbers.randint(right == 0, 2))]
        elif change < 0.8:  # a request again, with another answer
            text = [*text[: numbers.randint(1, len(text))], *words(numbers.randint(1, 3), 5)]
        elif change < 0.9:  # steps without drafts
            text = [*text, *words(numbers.randint(1, 12), 3)]
        else:
            text = words(numbers.randint(1, 40), numbers.randint(0, 4))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_next"])
def test_of_a_long_text_the_end_is_read_and_its_first_tokens(kind: str) -> None:
    forward = Counted(kind)
    made, text = reader(kind, forward), words(3000)
    found = drafts(made, text, part=64)
    assert found == drafts(reader(kind), [*text[:4], *text[-WINDOW_TOKENS:]], part=64)
    assert sum(forward.lengths) < WINDOW_TOKENS + 20


def test_logits_are_computed_for_the_end_of_what_is_left_alone() -> None:
    """Those of a whole part would take longer than the model itself where it has a large vocabulary."""
    for kind in ("llama", "qwen3_next"):
        forward = Counted(kind)
        made, text = reader(kind, forward), words(50)
        made.turn_to(text)
        forward.lengths.clear()
        assert made.draft(3, VOCAB, greedy) == drafts(reader(kind), text, 3)
        assert forward.lengths == [48, 2, 1, 1]


def test_a_text_that_grows_is_read_once_and_begun_again_when_it_is_long() -> None:
    forward = Counted("llama")
    made, text, most = reader("llama", forward), words(40), 0
    for _ in range(400):
        text += [*drafts(made, text, part=64), 1]
        most = max(most, made.nbytes)
    assert len(text) > 2000
    assert sum(forward.lengths) < 2 * len(text) + 3 * WINDOW_TOKENS
    one = reader("llama")
    drafts(one, words(4), part=64)
    assert most <= one.nbytes * (MOST_TOKENS // 256 + 1)


def test_nothing_is_read_up_to_a_token_that_the_model_has_not() -> None:
    for unknown in (-5, VOCAB):
        text = [*words(20), unknown, *words(9, 2)]
        wanted = drafts(reader("llama"), [*words(4), *words(9, 2)])
        assert drafts(reader("llama"), text) == wanted
        made = reader("llama")
        assert len(drafts(made, words(20))) == 4
        assert drafts(made, text) == wanted
        assert len(drafts(reader("llama"), [*words(20), unknown])) <= 4
        assert drafts(reader("llama"), [3, unknown]) == []


@pytest.mark.parametrize("size", [VOCAB - 9, VOCAB + 9])
def test_the_models_may_have_rows_for_other_numbers_of_tokens(size: int) -> None:
    made, seen = reader("llama"), []

    def draw(logits: mx.array) -> mx.array:
        seen.append(logits)
        return greedy(logits)

    made.turn_to(words(30))
    assert max(made.draft(5, size, draw)) < min(size, VOCAB)
    assert {logits.shape for logits in seen} == {(1, size)}
