"""Pictures on their way through the engine: encoded in slices, beside other answers, within bounds; freed in time."""

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from time import monotonic, sleep
from typing import cast
from unittest.mock import patch

import mlx.core as mx
import pytest

import runner.media.encoder
from runner.engine.policy import Decode, Encode
from runner.media.encoder import OwnTowers
from runner.media.towers import Grid, Tower
from tests.lib.patience import stretched
from tests.lib.seeing import HEARS, NAMES
from tests.lib.seeing_engine import NotingPolicy, SeeingEngine, four_together, picture
from tests.unit.media.pictures import spans
from tests.unit.media.sounds import noise, wav

RED, BLUE = picture("red"), picture("blue")
LARGE = picture("green", 256, 192)
HISS = wav(noise(40_000, 3).reshape(-1, 2), 22_050)
QWEN, CONFORMER = "qwen3.5-seeing", HEARS[0]


class FaultyTower:
    """A tower, of which one piece finds no memory, or goes wrong otherwise."""

    def __init__(self, tower: Tower, times: int, error: Exception) -> None:
        self._tower, self._times, self._error = tower, times, error

    def encode(self, patches: mx.array, grid: Grid) -> Iterator[mx.array]:
        for number, step in enumerate(self._tower.encode(patches, grid)):
            if number == 1 and self._times > 0:
                self._times -= 1
                raise self._error
            yield step

    def encode_bytes(self, grid: Grid) -> int:
        return self._tower.encode_bytes(grid)


def faulty(tower: Tower, times: int, error: Exception) -> OwnTowers:
    return OwnTowers(cast("Tower", FaultyTower(tower, times, error)))


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_one_batch_have_positions_of_their_own(name: str) -> None:
    four_together(SeeingEngine(name), RED, BLUE, LARGE)


@pytest.mark.parametrize(
    ("name", "tower", "piece_bytes", "data", "least"),
    [(QWEN, "tower", 1 << 18, LARGE, 4), (CONFORMER, "sound_tower", 1 << 14, HISS, 10)],
)
def test_other_answers_step_between_two_pieces(
    name: str, tower: str, piece_bytes: int, data: bytes, least: int
) -> None:
    policy = NotingPolicy(max_gap_s=0.0)
    engine = SeeingEngine(name, policy)
    other = engine.ask("a text", max_tokens=1000)
    engine.until(lambda: len(other.tokens) > 2)
    before = len(policy.slices)
    with patch.object(getattr(engine.model, tower), "piece_bytes", piece_bytes):
        asked = engine.ask("see [img-0]", data)
        engine.until(lambda: asked.finished is not None)
    slices = policy.slices[before:]
    pieces = [at for at, each in enumerate(slices) if isinstance(each, Encode)]
    assert len(pieces) >= least
    assert other.finished is None
    for at in range(len(slices) - 1):
        if not isinstance(slices[at], Decode) and at < pieces[-1]:
            assert isinstance(slices[at + 1], Decode), f"{slices[at : at + 2]}"
    other.request.cancel()
    engine.finish()
    engine.check()


def test_nothing_waits_for_pixels_but_the_request_that_shows_them() -> None:
    engine = SeeingEngine(QWEN)
    engine.helper.waits = True
    asked, other = engine.ask("see [img-0]", RED), engine.ask("a text")
    engine.finish()
    assert other.finished is not None
    assert asked.finished is None
    assert engine.scheduler.idle
    wakes = engine.wakes
    engine.helper.run()
    assert engine.wakes == wakes + 1
    assert not engine.scheduler.idle
    engine.finish()
    assert asked.finished is not None
    engine.check()


def encoded_more_than(policy: NotingPolicy, pieces: int) -> bool:
    return sum(isinstance(each, Encode) for each in policy.slices) > pieces


def falls_to(nbytes: int) -> bool:
    """True if MLX soon has no more than this in use: its threads release the buffers of a computation a moment after
    it has ended."""
    until = monotonic() + stretched(10)
    while mx.get_active_memory() > nbytes and monotonic() < until:
        sleep(0.01)
    return mx.get_active_memory() <= nbytes


def test_a_request_that_is_cancelled_while_its_picture_is_encoded_frees_what_it_held() -> None:
    policy = NotingPolicy()
    engine = SeeingEngine(QWEN, policy)
    for seen in (RED, LARGE):  # the tower keeps tables of the latest sizes
        engine.answer("see [img-0]", seen)
    engine.scheduler.cache.evict()
    engine.encoder.clear()
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    for pieces in (1, 2):
        with patch.object(engine.model.tower, "piece_bytes", 4096):
            asked = engine.ask("see [img-0] here", LARGE)
            policy.slices.clear()
            engine.until(partial(encoded_more_than, policy, pieces))
            assert mx.get_active_memory() > before
            asked.request.cancel()
            engine.advance()
        engine.scheduler.cache.evict()
        gc.collect()
        mx.synchronize()
        assert engine.scheduler.idle
        assert falls_to(before)
        assert engine.encoder.nbytes == 0
        assert engine.store.held_bytes == 0


def test_a_batch_keeps_no_request_alive_that_has_left_it() -> None:
    engine = SeeingEngine(QWEN)
    short = engine.ask("see [img-0]", RED, max_tokens=9)
    long = engine.ask("see [img-0]", BLUE, max_tokens=90)
    engine.until(lambda: any(len(batch.generations) == 2 for batch in engine.scheduler.batches.all))
    (generation,) = [each for each in engine.scheduler._generations if each.request is short.request]
    held = weakref.ref(generation.media)
    del generation
    engine.until(lambda: short.finished is not None)
    engine.advance(2)
    gc.collect()
    assert held() is None
    assert long.finished is None
    engine.finish()
    engine.check()


def test_features_are_kept_within_a_bound_and_the_oldest_go_first() -> None:
    engine = SeeingEngine(QWEN)
    six = 6 * 64 * 4
    with patch.object(runner.media.encoder, "MOST_FEATURE_BYTES", 2 * six + 100):
        for colour in ("red", "blue", "lime"):
            engine.answer("see [img-0]", picture(colour))
            assert engine.encoder.nbytes <= 2 * six
        for colour, encoded in (("lime", 3), ("blue", 3), ("red", 4), ("lime", 5)):
            engine.scheduler.cache.evict()
            engine.answer("see [img-0]", picture(colour))
            assert engine.encoder.counts().encoded == encoded
        assert engine.encoder.counts().feature_bytes == 2 * six
        engine.scheduler.cache.evict()
        engine.answer("see [img-0] twice: [img-0]", LARGE)  # more than the bound by itself, encoded once
        assert engine.encoder.counts().encoded == 6
        assert engine.encoder.nbytes == 0
    engine.check()


@pytest.mark.parametrize(("name", "data"), [(QWEN, LARGE), (CONFORMER, HISS)])
def test_an_item_that_cannot_be_encoded_is_refused_before_it_is_decoded(name: str, data: bytes) -> None:
    engine = SeeingEngine(name, room=1 << 30)
    asked = engine.ask("see [img-0]", data)
    engine.memory.budget_bytes = engine.encoder.towers.needed_bytes(spans(asked.request)[0].item)
    engine.finish()
    assert "there is no room to encode a picture" in asked.error
    assert "the budget is" in asked.error
    assert "--memory" in asked.error
    assert engine.store.decoded == 0
    assert engine.encoder.counts().encoded == 0
    assert not engine.scheduler._generations


def test_unused_entries_and_features_make_room_for_a_picture() -> None:
    engine = SeeingEngine(QWEN)
    engine.answer("see [img-0] " + "and more " * 30, RED)
    (span,) = spans(engine.asked[0].request)
    needed = engine.encoder.towers.needed_bytes(span.item)
    engine.memory.budget_bytes = needed + engine.scheduler.cache.nbytes + 1
    asked = engine.ask("look [img-0]", BLUE)
    engine.finish()
    assert asked.finished is not None, asked.error
    assert engine.encoder.counts().encoded == 2
    engine.check()


def test_a_request_begins_again_once_if_memory_runs_out_while_it_encodes() -> None:
    for times, fails in ((1, False), (2, True)):
        engine = SeeingEngine(QWEN)
        engine.encoder.towers = faulty(engine.model.tower, times, MemoryError("on purpose"))
        asked, other = engine.ask("see [img-0] here", LARGE), engine.ask("a text", max_tokens=20)
        engine.finish()
        assert bool(asked.finished) is not fails
        assert ("out of memory" in asked.error.lower()) is fails
        assert other.finished is not None
        engine.check()
        engine.answer("see [img-0] here", LARGE)


def test_any_other_fault_of_a_tower_ends_the_one_request() -> None:
    engine = SeeingEngine(QWEN)
    engine.encoder.towers = faulty(engine.model.tower, 1, ValueError("on purpose"))
    for data in (LARGE, RED):
        engine.ask("see [img-0]", data)
    engine.finish()
    assert sum("on purpose" in asked.error for asked in engine.asked) == 1
    assert sum(asked.finished is not None for asked in engine.asked) == 1
    engine.check()


def test_the_text_before_a_picture_is_kept_when_its_tower_fails() -> None:
    engine = SeeingEngine(QWEN)
    engine.encoder.towers = faulty(engine.model.tower, 1, ValueError("on purpose"))
    failed = engine.ask("a text before it [img-0]", LARGE)
    engine.finish()
    assert "on purpose" in failed.error
    again = engine.answer("a text before it [img-0]", LARGE)
    assert again.session is not None
    assert again.session.cached >= len("a text before")
    engine.check()
