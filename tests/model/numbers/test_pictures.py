"""The numbers about pictures: in statistics, in the nodes of the cache, and in previews of their text."""

from protocol.stats import Stats
from runner.engine.parts import WingCounts
from runner.engine.policy import Encode
from runner.numbers.wing import collect, draw_cache, preview_text
from tests.lib.seeing_engine import NotingPolicy, SeeingEngine, picture
from tests.lib.tiny_engine import parts_of

QWEN = "qwen3.5-seeing"
RED, BLUE = picture("red"), picture("blue")


def stats(engine: SeeingEngine) -> Stats:
    return collect(parts_of(engine, WingCounts(media=engine.encoder.counts))).stats


def test_pictures_are_counted_with_their_tokens_time_and_hits() -> None:
    engine = SeeingEngine(QWEN)
    counts = stats(engine).media
    assert (counts.encoded, counts.soft_tokens, counts.encode_s, counts.feature_hits, counts.feature_bytes) == (0,) * 5
    engine.answer("see [img-0] and [img-1]", RED, BLUE)
    first = stats(engine).media
    assert (first.encoded, first.soft_tokens, first.feature_hits) == (2, 12, 0)
    assert first.encode_s > 0
    slices = stats(engine).slices
    assert isinstance(engine.schedule, NotingPolicy)
    assert slices.encode == sum(isinstance(each, Encode) for each in engine.schedule.slices) >= 2
    assert first.feature_bytes == 12 * 64 * 4
    engine.scheduler.cache.evict()
    engine.answer("see [img-0] and [img-1]", RED, BLUE)
    second = stats(engine).media
    assert (second.encoded, second.soft_tokens, second.feature_hits) == (2, 12, 2)
    assert second.encode_s == first.encode_s
    assert stats(engine).slices.encode == slices.encode
    engine.scheduler.cache.evict()
    engine.encoder.clear()
    assert stats(engine).media.feature_bytes == 0


def test_a_preview_shows_a_picture_as_one_word() -> None:
    engine = SeeingEngine(QWEN)
    engine.answer("see [img-0] and [img-1].", RED, RED)
    (node,) = draw_cache(parts_of(engine, inspect_text=True, spelled_by=engine.model.tokenizer))
    assert node.text is not None
    assert node.text.count("[media]") == 2
    assert node.text.startswith("see <[media]= and <")
    tokenizer = engine.model.tokenizer
    assert preview_text(tokenizer, [-3] * 9000 + [*tokenizer.encode("ab")]) == "[media]ab"
    assert preview_text(tokenizer, [-3, -3, -4, -4]) == "[media][media]"
