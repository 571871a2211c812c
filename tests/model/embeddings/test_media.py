"""Pictures and sounds in embeddings: the numbers of mlx-vlm, alone and beside others, encoded in turns."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest

from runner.embeddings.embedder import EmbeddingSizes, TextEmbedder, TextToEmbed
from runner.errors import RequestError
from runner.media.encoder import MediaEncoder, OwnTowers, PromptForward
from runner.media.prompt import MediaPrompt
from tests.model.embeddings.record import CASES, RECORDED_MEDIA, Model, model

SIZES = EmbeddingSizes(768, (), frozenset({"image", "audio"}), token_bytes=1, least_bytes=0)
CLOSE = 1e-5


@pytest.fixture
def module() -> Iterator[Any]:
    yield model().encoder
    model().support.store.close()
    model.cache_clear()


def away(one: mx.array, other: mx.array) -> float:
    return cast("float", mx.abs(one - other).max().item())


def dot(one: mx.array, other: mx.array) -> float:
    return cast("float", (one * other).sum().item())


def embedder(module: Any, room_bytes: int = 1 << 30) -> TextEmbedder:
    own = model()
    towers, no_forward = OwnTowers(own.tower, own.sound_tower), cast("PromptForward", SimpleNamespace(shifted=None))
    encoder = MediaEncoder(towers, own.support.store, no_forward, lambda: None, splits=True)
    return TextEmbedder(module, SIZES, 32, room_bytes, encoder.begin)


def shown(own: Model, name: str) -> TextToEmbed:
    prompt = own.prompt(CASES[name])
    assert isinstance(prompt, MediaPrompt)
    return TextToEmbed(prompt.ids, prompt)


def computed(made: TextEmbedder, texts: Sequence[TextToEmbed]) -> list[mx.array]:
    for text in texts:
        made.add_text(text)
    while any(not text.found.done() for text in texts):
        if made.pending():
            made.advance()
    assert not made.pending()
    return [mx.array(text.found.result()) for text in texts]


@pytest.fixture
def recorded() -> dict[str, mx.array]:
    return cast("dict[str, mx.array]", mx.load(str(RECORDED_MEDIA)))


def test_embeddings_of_media_are_mlx_vlms(module: Any, recorded: dict[str, mx.array]) -> None:
    made = embedder(module)
    for name in CASES:
        (found,) = computed(made, [shown(model(), name)])
        assert away(found, recorded[name]) < CLOSE
        assert abs(dot(found, found) - 1) < CLOSE
    assert dot(recorded["both"], recorded["picture"]) < 0.9999


def test_media_and_texts_together_are_as_each_alone(module: Any, recorded: dict[str, mx.array]) -> None:
    texts = [shown(model(), name) for name in CASES]
    plain = [TextToEmbed([3, 4, 5, 6]), TextToEmbed([*range(40)])]
    (first, second) = computed(embedder(module), [TextToEmbed(each.tokens) for each in plain])
    found = computed(embedder(module), [plain[0], *texts, plain[1]])
    for name, each in zip(CASES, found[1:-1], strict=True):
        assert away(each, recorded[name]) < CLOSE
    assert away(found[0], first) < CLOSE
    assert away(found[-1], second) < CLOSE


def test_a_text_that_nobody_waits_for_leaves_nothing(module: Any) -> None:
    made, text = embedder(module), shown(model(), "both")
    made.add_text(text)
    while not made.pending():
        pass
    made.advance()
    text.found.cancel()
    made.advance()
    assert (made._showing, made._waiting) == ([], [])


def test_what_there_is_no_room_for_is_refused_alone(module: Any) -> None:
    made = embedder(module, room_bytes=1000)
    text, other = shown(model(), "picture"), TextToEmbed([3, 4])
    made.add_text(text)
    computed(made, [other])
    with pytest.raises(RequestError, match=r"^there is no room to encode a picture or a sound: that takes about"):
        text.found.result(timeout=0)
