"""Sounds on their way through the engine: cut anywhere, beside pictures and other answers, never taken for others."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from runner.engine.policy import Prefill
from runner.media.sound_header import RATE
from tests.lib.seeing import HEARS, SOUND, SOUND_END, SOUND_START
from tests.lib.seeing_engine import NotingPolicy, SeeingEngine, picture
from tests.unit.media.pictures import spans
from tests.unit.media.sounds import noise, speech, wav

RED = picture("red")
CLICK, CLACK = wav(noise(9000, 1)), wav(noise(9000, 2))
HISS = wav(noise(40_000, 3).reshape(-1, 2), 22_050)
CONFORMER, UNIFIED = HEARS
CACHES = ("trie", "single", "none")


@pytest.fixture(params=HEARS)
def engine(request: pytest.FixtureRequest) -> Iterator[SeeingEngine]:
    made = SeeingEngine(request.param)
    yield made
    made.check()


def test_a_sound_is_heard(engine: SeeingEngine) -> None:
    asked = engine.answer("what is [img-0] here?", CLICK)
    (span,) = spans(asked.request)
    frames = (9000 + 160 - 321) // 160 + 1
    tokens = (frames + 3) // 4 if engine.model.name == CONFORMER else -(-9000 // 640)
    assert span.stop - span.start == tokens
    assert asked.request.prompt[span.start - 1 : span.stop + 1] == [SOUND_START, *[SOUND] * tokens, SOUND_END]
    counts = engine.encoder.counts()
    assert (counts.encoded, counts.soft_tokens) == (1, tokens)


def test_sounds_of_one_length_are_told_apart(engine: SeeingEngine) -> None:
    first, other = engine.answer("what is [img-0] here?", CLICK), engine.answer("what is [img-0] here?", CLACK)
    assert first.request.prompt == other.request.prompt
    assert other.counts[0] == other.first_soft
    assert [entry.logprob for entry in first.entries] != [entry.logprob for entry in other.entries]


def test_the_same_sound_again_costs_nothing(engine: SeeingEngine) -> None:
    prompt = "what is [img-0] here? " + "Say it again, and slowly. " * 3
    engine.answer(prompt, CLICK, max_tokens=1)
    engine.encoder.clear()
    again = engine.answer(prompt, CLICK)
    assert again.counts[0] == len(again.request.prompt)
    assert again.counts[1] >= len(again.request.prompt) - 4
    assert (engine.encoder.counts().encoded, engine.encoder.counts().feature_hits) == (1, 0)
    assert engine.store.decoded == 1
    engine.scheduler.cache.evict()
    engine.answer(prompt, CLICK)
    assert engine.encoder.counts().encoded == 2
    engine.scheduler.cache.evict()
    engine.answer(prompt, CLICK)
    assert (engine.encoder.counts().encoded, engine.encoder.counts().feature_hits) == (2, 1)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", HEARS)
def test_a_conversation_about_sounds_and_a_picture(name: str, cache: str) -> None:
    engine = SeeingEngine(name, cache=cache)
    first = engine.answer("what is [img-0] here?", CLICK)
    second = engine.answer("what is [img-0] here? and [img-1] there", CLICK, RED)
    third = engine.answer("what is [img-0] here? and [img-1] there and [img-2] [img-0]", CLICK, RED, HISS)
    for before, after in ((first, second), (second, third)):
        assert after.counts[0] >= (0 if cache == "none" else len(before.request.prompt))
    assert engine.encoder.counts().encoded == 3
    assert engine.store.decoded == 3
    engine.check()


@pytest.mark.parametrize("chunk", [1, 3, 7])
@pytest.mark.parametrize("name", HEARS)
def test_a_prompt_may_be_cut_within_a_sound(name: str, chunk: int) -> None:
    policy = NotingPolicy(chunk)
    engine = SeeingEngine(name, policy)
    asked = engine.answer("[img-0] or [img-1]?", CLICK, RED)
    sound, shown = spans(asked.request)
    lengths = [each.tokens for each in policy.slices if isinstance(each, Prefill)]
    assert sum(each <= chunk for each in lengths) > (sound.stop - sound.start) // chunk
    assert (max(lengths) == shown.stop - shown.start) is (name == UNIFIED), "pictures there are not cut"
    engine.check()


@pytest.mark.parametrize("name", HEARS)
def test_a_cancelled_prompt_is_resumed_within_a_sound(name: str) -> None:
    inside = 0
    for slices in range(5, 17, 2):
        engine = SeeingEngine(name)
        engine.schedule.chunk_tokens = 3
        gone = engine.ask("say [img-0] here and [img-1]?", CLICK, RED)
        engine.advance(slices)
        gone.request.cancel()
        engine.finish()
        again = engine.answer("say [img-0] here and [img-1]?", CLICK, RED)
        span = spans(again.request)[0]
        inside += span.start < again.counts[1] < span.stop
        engine.check()
    assert inside >= 2, "what was computed of a sound is not computed again"


def test_a_batch_of_sounds_pictures_and_text(engine: SeeingEngine) -> None:
    engine.ask("hear [img-0] and say", CLICK, max_tokens=12)
    engine.ask("[img-0] and [img-1] are louder", HISS, RED, max_tokens=12)
    engine.ask("a text without any sound", max_tokens=12)
    engine.ask("[img-0]", CLACK, max_tokens=7)
    most = 0
    while not engine.scheduler.idle:
        engine.advance()
        most = max([most, *(len(batch.generations) for batch in engine.scheduler.batches.all)])
    assert most >= 3
    assert all(asked.finished for asked in engine.asked)


def test_a_sound_of_several_pieces(engine: SeeingEngine) -> None:
    data = wav(speech(31, [15.0], 8000), 8000, 8)
    asked = engine.answer("hear [img-0] now", data, max_tokens=3)
    (span,) = spans(asked.request)
    assert len(span.item.clip.rows) == (2 if engine.model.name == CONFORMER else 1)  # type: ignore[attr-defined]
    assert 770 <= span.stop - span.start <= 780
    assert engine.store.decoded == 1, "measured and computed at once"
    again = engine.answer("hear [img-0] now", data, max_tokens=3)
    assert engine.store.decoded == 1
    assert again.counts[0] == len(again.request.prompt)


def test_features_of_a_picture_and_a_sound_share_one_bound(
    engine: SeeingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.media.encoder.MOST_FEATURE_BYTES", 15 * 64 * 4)
    engine.answer("[img-0]", CLICK)
    assert engine.encoder.nbytes <= 15 * 64 * 4
    engine.answer("[img-0]", RED)
    engine.scheduler.cache.evict()
    engine.answer("[img-0]", CLICK)
    assert engine.encoder.counts().encoded == 3


def test_silence_and_loud_noise_are_numbers(engine: SeeingEngine) -> None:
    for samples in (np.zeros(RATE, np.float32), noise(RATE) * np.float32(1e30)):
        asked = engine.answer("[img-0]", wav(samples, bits=32, form=3))
        assert all(np.isfinite(entry.logprob) for entry in asked.entries)
        assert mx.isfinite(engine.features(spans(asked.request)[0].item)).all()
