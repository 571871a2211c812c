"""A draft model drafts as if it had read nothing but the present text, whatever it has read before and beside it."""

import random
from collections.abc import Sequence
from typing import cast
from unittest.mock import patch

import mlx.core as mx
import pytest

from runner.cache.layers.batched import arrays_of
from runner.cache.session import Session
from runner.drafts.drafting import DraftedAnswer
from runner.drafts.own_model import WINDOW_TOKENS, OwnDraftModel
from runner.errors import ModelError
from runner.sampling.options import SamplingOptions
from runner.sampling.sampler import Sampler
from scripts.tools.models.tiny import VOCAB, tiny, words
from tests.lib.tiny_engine import BATCHABLE, plain_forward
from tests.model.drafts.answers import NOBODY


class Counted:
    """The forward of a tiny model, and the shape of each call."""

    def __init__(self, kind: str) -> None:
        self._forward = plain_forward(tiny(kind))
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, tokens: mx.array, layers: list[object]) -> mx.array:
        self.calls.append(tokens.shape)
        return self._forward(tokens, layers)

    @property
    def tokens(self) -> int:
        return sum(rows * length for rows, length in self.calls)


class Spoken:
    """A text that grows, as far as a draft model looks."""

    def __init__(self, recorded: Sequence[int]) -> None:
        self.recorded = [*recorded]


def own(kind: str, forward: Counted | None = None) -> OwnDraftModel:
    made = OwnDraftModel(kind, tiny(kind).make_layers, forward or Counted(kind), VOCAB)
    if forward is not None:
        forward.calls.clear()
    return made


def asking(texts: Sequence[Spoken], size: int = VOCAB) -> list[DraftedAnswer]:
    return [
        DraftedAnswer(
            NOBODY, cast("Session", text), 99, Sampler(SamplingOptions(temperature=0), [], size, 4096), row, 0
        )
        for row, text in enumerate(texts)
    ]


def drafts(model: OwnDraftModel, texts: Sequence[Spoken], most: int = 4, size: int = VOCAB) -> list[list[int]]:
    """The drafts after each text, when enough of it is read."""
    answers, found = asking(texts, size), dict[int, list[int]]()
    for _ in range(20):
        if not model.read_texts(answers, briefly=False):
            found |= {row: [*each] for row, each in enumerate(model.propose(answers, [], most)) if each}
        if len(found) == len(texts):
            return [found[row] for row in range(len(texts))]
    raise AssertionError("it never drafts")


def alone(kind: str, text: Sequence[int], most: int = 4, size: int = VOCAB) -> list[int]:
    """The drafts of a model that has read nothing else."""
    return drafts(own(kind), [Spoken(text)], most, size)[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", BATCHABLE)
def test_drafts_depend_on_each_text_alone(kind: str, seed: int) -> None:
    """Wherever it stood before, and whatever is drafted beside it."""
    numbers, model = random.Random(seed), own(kind)
    texts = [Spoken(words(numbers.randint(2, 30), place)) for place in range(3)]
    for _ in range(20):
        most = numbers.randint(1, 6)
        asked = [text for text in texts if numbers.random() < 0.9] or texts[:1]
        found = drafts(model, asked, most)
        for text, own_drafts in zip(asked, found, strict=True):
            assert own_drafts == alone(kind, text.recorded, most)
            right = numbers.randint(0, most)  # some of them were right
            text.recorded += [*own_drafts[:right], *[numbers.randrange(VOCAB)] * numbers.randint(right == 0, 2)]
        if numbers.random() < 0.1:  # steps without drafts
            texts[0].recorded += words(numbers.randint(1, 90), 3)
        if numbers.random() < 0.1:  # another request
            texts[numbers.randrange(3)] = Spoken(words(numbers.randint(2, 40), numbers.randint(0, 4)))
        assert model.nbytes <= model.most_bytes(8)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_next"])
def test_of_a_long_text_the_end_is_read_and_its_first_tokens(kind: str) -> None:
    forward = Counted(kind)
    text = words(3000)
    found = drafts(own(kind, forward), [Spoken(text)])
    assert found == [alone(kind, [*text[:4], *text[-WINDOW_TOKENS:]])]
    assert forward.tokens < WINDOW_TOKENS + 20


def test_one_forward_drafts_a_token_of_each_text_and_reads_what_came() -> None:
    """Where drafts were right, one or two tokens: the layers have the others."""
    for kind, again in (("llama", 2), ("qwen3_next", 5)):
        forward = Counted(kind)
        model, texts = own(kind, forward), [Spoken(words(count, count)) for count in (30, 40, 20)]
        answers = asking(texts)
        for _ in texts:  # one after the other
            assert not model.read_texts(answers, briefly=False)
        found = model.propose(answers, [], 4)
        assert forward.calls == [(1, 29), (1, 39), (1, 19), *[(3, 1)] * 4]
        forward.calls.clear()
        for text, own_drafts in zip(texts, found, strict=True):
            text.recorded += [*own_drafts, 7]
        drafts(model, texts)
        assert forward.calls == [(3, again), *[(3, 1)] * 3]
        forward.calls.clear()
        for text, right in zip(texts, (0, 1, 3), strict=True):
            text.recorded += [*alone(kind, text.recorded)[:right], 9]
        drafts(model, texts)
        assert forward.calls[0] == (3, 4 if kind == "qwen3_next" else 1)
        assert len(forward.calls) == 4


def test_a_text_that_grows_is_read_once_and_begun_again_when_it_is_long() -> None:
    forward = Counted("llama")
    model, text, most = own("llama", forward), Spoken(words(40)), 0
    for _ in range(400):
        text.recorded += [*drafts(model, [text])[0], 1]
        most = max(most, model.nbytes)
    assert len(text.recorded) > 2000
    assert forward.tokens < 2 * len(text.recorded) + 3 * WINDOW_TOKENS
    assert most <= model.most_bytes(8)


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_one_more_turn_of_a_conversation_is_read_on(kind: str) -> None:
    """An edited one is begun anew, and so is one that begins like one that goes on."""
    forward = Counted(kind)
    model, text = own(kind, forward), Spoken(words(200))
    text.recorded += drafts(model, [text])[0][:2]
    for edited, more in ((0, words(20, 5)), (0, [8]), (9, words(20, 6))):
        said = text.recorded[: len(text.recorded) - edited]
        del text
        text = Spoken([*said, *more])
        forward.calls.clear()
        assert drafts(model, [text]) == [alone(kind, text.recorded)]
        assert forward.tokens > 200 if edited else forward.tokens < 40
    other = Spoken([*text.recorded, 8])
    forward.calls.clear()
    assert drafts(model, [other]) == [alone(kind, other.recorded)]
    assert forward.tokens > 200


def test_a_text_that_waits_to_be_read_holds_up_no_other_one() -> None:
    model, short, long = own("llama"), Spoken(words(20)), Spoken(words(1000, 2))
    answers, reads = asking([short, long]), 0
    while True:
        assert not model.read_texts(answers, briefly=False)
        found = model.propose(answers, [], 3)
        assert found[0] == alone("llama", short.recorded, 3)
        if found[1]:
            break
        reads += 1
        short.recorded.append(reads)
        long.recorded.append(reads)
    assert 8 < reads < 16
    begun = 1000 + 8  # the end of the text when reading begins
    seen, kind = [*long.recorded[:4], *long.recorded[begun - WINDOW_TOKENS :]], tiny("llama")
    for token in found[1]:
        logits = kind.logits(mx.array([seen]), kind.make_layers())[0, -1]
        assert token == mx.argmax(logits).item()
        seen.append(token)


@pytest.mark.parametrize("kind", BATCHABLE)
def test_what_several_texts_read_is_computed_before_they_draft(kind: str) -> None:
    """Or it would count as a part of what drafting takes."""
    model, texts = own(kind), [Spoken(words(40, number)) for number in range(2)]
    answers, computed = asking(texts), list[mx.array]()

    def evaluate(arrays: list[mx.array]) -> None:
        computed.extend(arrays)
        evaluated(*arrays)

    while model.read_texts(answers, briefly=False):
        pass
    model.propose(answers, [], 2)
    for text in texts:
        text.recorded += words(40, 9)
    evaluated = mx.eval
    with patch.object(mx, "eval", evaluate):
        model.read_texts(answers, briefly=False)
    assert model._batch is not None
    held = [array for cache in model._batch.caches for array in arrays_of(cache)]
    assert {*map(id, held)} <= {*map(id, computed)}


def test_no_more_is_read_at_once_than_one_text_may() -> None:
    """Texts that begin together are read one after the other, and those that fell behind together a bit of each."""
    forward = Counted("llama")
    model, texts = own("llama", forward), [Spoken(words(50, place)) for place in range(3)]
    drafts(model, texts)
    assert [call for call in forward.calls if call[1] > 2] == [(1, 49)] * 3
    for text in texts:
        text.recorded += words(40, 7)
    forward.calls.clear()
    assert drafts(model, texts, 2) == [alone("llama", text.recorded, 2) for text in texts]
    assert max(rows * length for rows, length in forward.calls) <= 64


def test_nothing_is_read_up_to_a_token_that_the_model_has_not() -> None:
    for unknown in (-5, VOCAB):
        text = [*words(20), unknown, *words(9, 2)]
        wanted = alone("llama", [*words(4), *words(9, 2)])
        assert alone("llama", text) == wanted
        model, grows = own("llama"), Spoken(words(20))
        assert len(drafts(model, [grows])[0]) == 4
        grows.recorded += text[20:]
        assert drafts(model, [grows]) == [wanted]
        for nothing in ([3, unknown], [3]):
            answers = asking([Spoken(nothing)])
            assert model.read_texts(answers, briefly=False)
            assert model.propose(answers, [], 4) == [()]


@pytest.mark.parametrize("size", [VOCAB - 9, VOCAB + 9])
def test_the_models_may_have_rows_for_other_numbers_of_tokens(size: int) -> None:
    assert max(alone("llama", words(30), 5, size)) < min(size, VOCAB)


def test_layers_that_cannot_go_back_row_by_row_draft_for_one_answer() -> None:
    with patch("runner.cache.layers.scans.StateReads.known", False):
        assert own("mamba2").most_together == 1
    assert own("mamba2").most_together > 1


@pytest.mark.parametrize("kind", ["deepseek_v41", "llama4"])
def test_layers_that_cannot_be_joined_are_refused(kind: str) -> None:
    with pytest.raises(ModelError, match="mlx-lm has no batch of"):
        own(kind)
