"""The numbers about pictures: in statistics, in the nodes of the cache, and in previews of their text."""

from runner.engine.observe.counters import Counters
from runner.engine.observe.report import Identity, Report, preview
from runner.engine.policy import Encode
from tests.lib.seeing_engine import CONTEXT, NotingPolicy, SeeingEngine, picture

QWEN = "qwen3.5-seeing"
RED, BLUE = picture("red"), picture("blue")


def report_on(engine: SeeingEngine, cache: str = "trie", *, text: bool = False) -> Report:
    identity = Identity("1.2.3", "tiny:latest", "qwen3_5", "cpu", CONTEXT, cache)
    tokenizer = engine.model.tokenizer if text else None
    return Report(identity, engine.scheduler, engine.memory, tokenizer, engine.encoder)


def test_pictures_are_counted_with_their_tokens_time_and_hits() -> None:
    engine = SeeingEngine(QWEN)
    counts = report_on(engine).collect().stats.pictures
    assert (counts.encoded, counts.soft_tokens, counts.encode_s, counts.feature_hits, counts.feature_bytes) == (0,) * 5
    engine.answer("see [img-0] and [img-1]", RED, BLUE)
    first = report_on(engine).collect().stats.pictures
    assert (first.encoded, first.soft_tokens, first.feature_hits) == (2, 12, 0)
    assert first.encode_s > 0
    slices = report_on(engine).collect().stats.slices
    assert isinstance(engine.policy, NotingPolicy)
    assert slices.encode == sum(isinstance(each, Encode) for each in engine.policy.slices) >= 2
    assert first.feature_bytes == 12 * 64 * 4
    engine.scheduler.cache.evict()
    engine.answer("see [img-0] and [img-1]", RED, BLUE)
    second = report_on(engine).collect().stats.pictures
    assert (second.encoded, second.soft_tokens, second.feature_hits) == (2, 12, 2)
    assert second.encode_s == first.encode_s
    assert report_on(engine).collect().stats.slices.encode == slices.encode
    engine.scheduler.cache.evict()
    engine.encoder.clear()
    assert report_on(engine).collect().stats.pictures.feature_bytes == 0


def test_a_model_that_sees_none_counts_none() -> None:
    engine = SeeingEngine(QWEN)
    identity = Identity("1.2.3", "tiny:latest", "qwen3_5", "cpu", CONTEXT, "trie")
    stats = Report(identity, engine.scheduler, engine.memory, None).collect().stats
    assert stats.pictures.encoded == 0


def test_slices_of_pictures_have_their_time() -> None:
    counters = Counters()
    for seconds in (0.25, 0.5):
        counters.sliced(Encode(), seconds)
    assert (counters.slices().encode, counters.slices().encode_s) == (2, 0.75)


def test_pixels_that_wait_for_the_tower_are_counted() -> None:
    engine = SeeingEngine(QWEN)
    engine.pixels.check(engine.ask("see [img-0]", RED).request.pictures.spans[0].picture, bool).result()  # type: ignore[union-attr]
    assert report_on(engine).collect().stats.pictures.pixel_bytes == 96 * 64 * 3
    engine.finish()
    assert report_on(engine).collect().stats.pictures.pixel_bytes == 0


def test_a_request_that_waits_for_a_picture_is_in_its_prefill() -> None:
    engine = SeeingEngine(QWEN)
    engine.helper.waits = True
    asked = engine.ask("see [img-0]", RED)
    engine.finish()
    (running,) = report_on(engine).collect().stats.running
    assert running.phase == "prefill"
    assert running.prompt == len(asked.request.prompt)
    assert running.prefilled == asked.first_soft
    engine.helper.run()
    engine.finish()
    assert report_on(engine).collect().stats.running == []


def test_nodes_say_how_many_pictures_they_hold() -> None:
    engine = SeeingEngine("glimmer-seeing")
    engine.answer("see [img-0] and [img-1]", RED, BLUE)
    (node,) = report_on(engine).nodes()
    assert node.pictures == 2
    engine.answer("see [img-0] and [img-1]", RED, RED)
    assert sorted(node.pictures for node in report_on(engine).nodes()) == [1, 1, 1]
    engine.answer("a text")
    assert sorted(node.pictures for node in report_on(engine).nodes()) == [0, 1, 1, 1]


def test_a_cache_of_one_sequence_has_its_pictures_too() -> None:
    engine = SeeingEngine(QWEN, cache="single")
    engine.answer("see [img-0] and [img-1]", RED, RED)
    (node,) = report_on(engine, "single").nodes()
    assert node.pictures == 2


def test_a_preview_shows_a_picture_as_one_word() -> None:
    engine = SeeingEngine(QWEN)
    engine.answer("see [img-0] and [img-1].", RED, RED)
    (node,) = report_on(engine, text=True).nodes()
    assert node.text is not None
    assert node.text.count("[picture]") == 2
    assert node.text.startswith("see <[picture]= and <")
    tokenizer = engine.model.tokenizer
    assert preview(tokenizer, [-3] * 9000 + [*tokenizer.encode("ab")]) == "[picture]ab"
    assert preview(tokenizer, [-3, -3, -4, -4]) == "[picture][picture]"
