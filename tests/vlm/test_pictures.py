"""Pictures in models of mlx-vlm: their answers are mlx-vlm's own, whatever the cache and the scheduler do."""

from functools import partial

import pytest

from runner.errors import RequestError
from runner.vlm import packages
from runner.vlm.pictures import PLACEHOLDERS
from tests.lib.seeing_engine import NotingPolicy, four_together, picture
from tests.unit.media.pictures import spans
from tests.vlm.pictures import BLUE, FIVE, RED, WIDE, answers_about_one_as_mlx_vlm_does, answers_as_mlx_vlm_does
from tests.vlm.seeing import VlmEngine


@pytest.mark.parametrize("package", sorted(packages.SEEING))
def test_a_package_sees_as_mlx_vlm_does(package: str) -> None:
    (answers_about_one_as_mlx_vlm_does if package in packages.ALONE else answers_as_mlx_vlm_does)(package)


def test_the_table_agrees_with_itself() -> None:
    assert packages.ALONE <= packages.SEEING <= packages.COMPARED
    assert PLACEHOLDERS.keys() >= packages.SEEING
    assert packages.BLIND.keys() <= packages.COMPARED - packages.SEEING


@pytest.mark.parametrize("cache", ["trie", "single", "none"])
@pytest.mark.parametrize("package", FIVE)
def test_a_conversation_about_pictures(package: str, cache: str) -> None:
    engine = VlmEngine(package, cache=cache)
    first = engine.answer("what is [img-0] here?", RED)
    second = engine.answer("what is [img-0] here? and there", RED)
    third = engine.answer("what is [img-0] here? and there is [img-1] too", RED, WIDE)
    assert min(second.counts[0], third.counts[0]) >= (0 if cache == "none" else len(first.request.prompt))
    assert engine.encoder.counts().encoded == 2
    assert engine.store.decoded == 2
    engine.check()


@pytest.mark.parametrize("package", FIVE)
def test_another_picture_of_the_same_size_misses_at_its_first_token(package: str) -> None:
    engine = VlmEngine(package)
    engine.answer("what is [img-0] here?", RED)
    other = engine.answer("what is [img-0] here?", RED[:-1] + b"\0")  # other bytes, the same pixels
    assert other.counts[0] == other.first_soft
    engine.check()


@pytest.mark.parametrize("package", FIVE)
def test_a_text_edited_behind_a_picture_and_one_before_it(package: str) -> None:
    engine = VlmEngine(package)
    first = engine.answer("long beginning [img-0] what is here?", RED)
    behind = engine.answer("long beginning [img-0] what was there?", RED)
    assert behind.counts[0] >= spans(first.request)[0].stop
    before = engine.answer("other beginning [img-0] what is here?", RED)
    assert before.counts[0] < before.first_soft
    assert engine.encoder.counts().encoded == 1
    engine.check()


@pytest.mark.parametrize("package", FIVE)
def test_what_was_evicted_is_computed_again(package: str) -> None:
    engine = VlmEngine(package)
    engine.answer("see [img-0] and [img-1]", RED, BLUE)
    engine.scheduler.cache.evict()
    again = engine.answer("see [img-0] and [img-1]", RED, BLUE)
    assert again.counts[1] == 0
    assert engine.encoder.counts().feature_hits == 2
    engine.scheduler.cache.evict()
    engine.encoder.clear()
    engine.answer("see [img-0] and [img-1]", RED, BLUE)
    assert engine.encoder.counts().encoded == 4
    engine.check()


@pytest.mark.parametrize("package", FIVE)
def test_answers_about_other_pictures_share_a_forward(package: str) -> None:
    four_together(VlmEngine(package), RED, BLUE, WIDE)


@pytest.mark.parametrize("package", FIVE)
def test_a_request_that_is_cancelled_at_any_slice_leaves_what_others_resume(package: str) -> None:
    for slices in (1, 2, 3, 4, 6, 9, 14):
        engine = VlmEngine(package, NotingPolicy(3))
        gone = engine.ask("what is [img-0] here and [img-1]?", RED, WIDE)
        engine.advance(slices)
        gone.request.cancel()
        engine.finish()
        engine.answer("what is [img-0] here and [img-1]?", RED, WIDE)


def test_nothing_of_a_picture_stays_for_the_text_after_it() -> None:
    """mlx-vlm keeps positions on a model; here a text that follows a picture begins at 0."""
    engine = VlmEngine("qwen3_vl", cache="none")
    alone = engine.answer("a text without any picture")
    engine.answer("see [img-0] and say", WIDE)
    again = engine.answer("a text without any picture")
    assert [entry.logprob for entry in alone.entries] == [entry.logprob for entry in again.entries]
    assert not engine.vlm.module.hooks.parts
    engine.check()


def test_a_package_of_one_picture_refuses_a_second_one_and_takes_the_first_twice() -> None:
    engine = VlmEngine("paddleocr_vl")
    assert "paddleocr_vl" in packages.ALONE
    engine.pictures.alone = True
    engine.answer("see [img-0] and", RED)
    with pytest.raises(RequestError, match=r"^paddleocr_vl takes only one picture in a prompt$"):
        engine.ask("see [img-0] and [img-1] too", RED, BLUE)
    assert engine.ask("see [img-0] and [img-0] too", RED).request.prompt


def test_a_size_is_measured_once() -> None:
    engine = VlmEngine("qwen3_vl")
    engine.preparer.measured = 0
    for _ in range(2):
        engine.answer("see [img-0] or [img-1]", RED, BLUE)
    assert engine.preparer.measured == 2
    assert engine.preparer.prepared == 2


def test_nothing_waits_for_a_picture_but_the_request_that_shows_it() -> None:
    engine = VlmEngine("smolvlm")
    engine.answer("see [img-0] of the same size", picture("blue"))
    engine.helper.waits = True
    asked, other = engine.ask("see [img-0]", RED), engine.ask("a text")
    engine.finish()
    assert (asked.finished, other.finished is not None) == (None, True)
    engine.helper.run()
    engine.until(lambda: asked.finished is not None)
    engine.check()


def test_a_package_that_makes_something_unknown_of_pictures_fails_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = VlmEngine("qwen3_vl")
    genuine = type(engine.vlm.module).get_input_embeddings  # type: ignore[attr-defined]

    def stranger(self: object, *args: object, **kwargs: object) -> object:
        found = genuine(self, *args, **kwargs)
        found.cross_attention_states = found.inputs_embeds
        return found

    monkeypatch.setattr(type(engine.vlm.module), "get_input_embeddings", partial(stranger, engine.vlm.module))
    asked = engine.ask("see [img-0]", RED)
    engine.finish()
    assert "pictures have results of unknown kinds: cross_attention_states" in asked.error
