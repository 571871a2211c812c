"""Prompts with pictures, resumed from a cache, are answered as without one; a wrong picture is never taken."""

from dataclasses import replace

import pytest

from runner.media.families import Gemma4
from runner.media.row_store import FamilyPictures
from tests.lib.seeing import END, NAMES, SOFT, START
from tests.lib.seeing_engine import SeeingEngine, picture
from tests.unit.media.pictures import spans

RED, BLUE, WIDE = picture("red"), picture("blue"), picture("green", 160, 64)
CACHES = ("trie", "single", "none")
SOME = ("qwen3.5-seeing", "gemma4-seeing", "gemma4-unified-seeing", "glimmer-seeing")


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_about_a_picture(name: str, cache: str) -> None:
    engine = SeeingEngine(name, cache=cache)
    first = engine.answer("what is [img-0] here?", RED)
    assert engine.encoder.counts().encoded == 1
    second = engine.answer("what is [img-0] here? and there", RED)
    third = engine.answer("what is [img-0] here? and there is [img-1] too", RED, BLUE)
    behind = 0 if cache == "none" else len(first.request.prompt)
    assert second.counts[0] >= behind
    assert third.counts[0] >= behind
    assert engine.encoder.counts().encoded == 2
    assert engine.store.decoded == 2
    engine.check()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_prompt_again_needs_neither_pixels_nor_features(name: str) -> None:
    engine = SeeingEngine(name)
    prompt = "what is [img-0] here? " + "Say it again, and slowly. " * 3
    first = engine.answer(prompt, RED, max_tokens=1)
    engine.encoder.clear()
    again = engine.answer(prompt, RED)
    total = len(again.request.prompt)
    assert again.counts[0] == total
    assert again.counts[1] in (total - 1, total - 4)  # a checkpoint, where layers cannot go back
    assert (engine.encoder.counts().encoded, engine.encoder.counts().feature_hits) == (1, 0)
    assert engine.store.decoded == 1
    assert first.tokens[0] == again.tokens[0]
    engine.check()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", SOME)
def test_another_picture_of_the_same_size_misses_at_its_first_token(name: str, cache: str) -> None:
    engine = SeeingEngine(name, cache=cache)
    first = engine.answer("what is [img-0] here?", RED)
    other = engine.answer("what is [img-0] here?", BLUE)
    assert first.request.prompt == other.request.prompt
    assert other.counts[0] == (0 if cache == "none" else other.first_soft)
    assert engine.encoder.counts().encoded == 2
    assert [entry.logprob for entry in first.entries] != [entry.logprob for entry in other.entries]
    engine.check()


@pytest.mark.parametrize("name", SOME)
def test_a_text_edited_behind_a_picture_and_one_before_it(name: str) -> None:
    engine = SeeingEngine(name)
    first = engine.answer("long beginning [img-0] what is here?", RED)
    behind = engine.answer("long beginning [img-0] what was there?", RED)
    assert behind.counts[0] > spans(first.request)[0].stop
    before = engine.answer("other beginning [img-0] what is here?", RED)
    assert before.counts[0] < before.first_soft
    assert engine.encoder.counts().encoded == 1
    assert engine.encoder.counts().feature_hits >= 1
    engine.check()


@pytest.mark.parametrize("name", SOME)
def test_a_cancelled_prompt_is_resumed_where_it_stands(name: str) -> None:
    for slices in (3, 4, 5, 6, 8, 11, 15):
        engine = SeeingEngine(name)
        engine.schedule.chunk_tokens = 3
        gone = engine.ask("what is [img-0] here and [img-1]?", RED, WIDE)
        engine.advance(slices)
        gone.request.cancel()
        engine.finish()
        engine.answer("what is [img-0] here and [img-1]?", RED, WIDE)


@pytest.mark.parametrize("cache", ["trie", "single"])
def test_the_same_file_under_another_budget_shares_nothing_of_it(cache: str) -> None:
    """Two preparations over one cache, one store of pixels, one tower: what a model's files say may change."""
    engine = SeeingEngine("gemma4-seeing", cache=cache)
    larger = FamilyPictures(Gemma4(budget=40), START, SOFT, END)
    small, large = engine.support, replace(engine.support, pictures=larger)
    prompt = "what is [img-0] here?"
    for support, encoded in ((small, 1), (large, 2), (small, 2), (large, 2)):
        engine.support = support
        assert isinstance(support.pictures, FamilyPictures)
        engine.store._pictures = support.pictures
        asked = engine.answer(prompt, WIDE)
        (span,) = spans(asked.request)
        assert engine.encoder.counts().encoded == encoded
        assert (span.stop - span.start) == support.pictures.family.geometry(160, 64).tokens
        if len(engine.asked) == 2:
            assert asked.counts[0] == asked.first_soft, "the text in front of it alone is shared"
    assert len({spans(asked.request)[0].item.name for asked in engine.asked}) == 2
    engine.check()
