"""Markers become tokens, and what cannot be shown is refused in the words that hosts know."""

import logging
from collections.abc import Sequence
from typing import cast

import pytest
from PIL import Image

from protocol import CompletionRequest, Media
from runner.engine.ports import NoVision
from runner.engine.request import Limits
from runner.errors import RequestError
from runner.media import sound_header
from runner.media.families import Clip, Gemma4, Gemma4Sound, Gemma4UnifiedSound, Qwen35, SoundFamily
from runner.media.prompt import MediaNames, MediaPrompt
from runner.media.row_store import FamilyPictures, RowStore
from runner.media.support import Hearing, MediaSupport
from runner.server.prepare import prepare
from runner.tokenizer import Tokenizer
from tests.lib.steps import result_of
from tests.unit.media.pictures import Here, encoded
from tests.unit.media.sounds import noise, speech, wav

CONTEXT = 1000
BOS, START, SOFT, END = 300, 301, 302, 303
PICTURES = FamilyPictures(Qwen35(min_pixels=1), START, SOFT, END)


class Pieces:
    """A tokenizer of bytes, with a token before the first text; notes the texts."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, bool]] = []

    def encode(self, text: str) -> list[int]:
        self.texts.append((text, True))
        return [BOS, *text.encode()]

    def encode_without_bos(self, text: str) -> list[int]:
        self.texts.append((text, False))
        return [*text.encode()]

    def token_text(self, token: int) -> str:
        return str(token)


@pytest.fixture
def pieces() -> Pieces:
    return Pieces()


@pytest.fixture
def support() -> MediaSupport:
    return MediaSupport(PICTURES, MediaNames(), RowStore(PICTURES))


def image(number: int = 0, columns: int = 3, rows: int = 2, colour: str = "red", kind: str = "image") -> Media:
    """A picture of so many soft tokens."""
    return Media(data=encoded(Image.new("RGB", (columns * 32, rows * 32), colour)), id=number, kind=kind)


def ids_of(text: str) -> list[int]:
    return [*text.encode()]


def expanded(
    support: MediaSupport,
    prompt: str,
    media: Sequence[Media],
    tokenizer: Tokenizer,
    most: int = CONTEXT,
    *,
    bos: bool = True,
) -> MediaPrompt | None:
    return result_of(support.expand(prompt, media, tokenizer, most, bos=bos))


def refused(prompt: str, media: Sequence[Media], pieces: Pieces, support: MediaSupport) -> str:
    with pytest.raises(RequestError) as error:
        expanded(support, prompt, media, cast("Tokenizer", pieces))
    return str(error.value)


def test_every_text_is_tokenized_by_itself_and_only_the_first_begins_a_prompt(
    pieces: Pieces, support: MediaSupport
) -> None:
    prompt = "ab[img-0]c[img-1][img-0]"
    media, tokenizer = [image(0), image(1, 2, 2)], cast("Tokenizer", pieces)
    found, later = (expanded(support, prompt, media, tokenizer, bos=bos) for bos in (True, False))
    assert found is not None
    assert later is not None
    assert pieces.texts[:4] == [("ab", True), ("c", False), ("", False), ("", False)]
    first, second = ([START, *[SOFT] * count, END] for count in (6, 4))
    assert found.ids == [BOS, *ids_of("ab"), *first, *ids_of("c"), *second, *first]
    assert found.keys == [-1 if at in range(4, 10) or at in range(19, 25) else key for at, key in enumerate(found.keys)]
    assert [span[:2] for span in found.spans] == [(4, 10), (13, 17), (19, 25)]
    assert [span.item.name for span in found.spans] == [-1, -2, -1]
    assert found.shift == 3 - 6 + 2 - 4 + 3 - 6
    assert later.ids == found.ids[1:]


@pytest.mark.parametrize("prompt", ["[img-1]", "[img-0][img-7] and [img-8]", "[img-99999999999999999999999999]"])
def test_a_marker_without_an_item_is_refused(prompt: str, pieces: Pieces, support: MediaSupport) -> None:
    assert refused(prompt, [image(0)], pieces, support).startswith("invalid image index: ")
    assert refused("[img-7]", [image(0)], pieces, support) == "invalid image index: 7"


WAVE = b"RIFF\x24\0\0\0WAVEfmt "


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (WAVE, "audio", "qwen3.5 does not support audio input"),
        (WAVE, "", "qwen3.5 does not support audio input"),
        (b"nothing known", "", "decode image: unknown format: want PNG, JPEG, GIF, WebP, BMP or AVIF"),
        (b"", "video", "qwen3.5 does not support video input"),
        (b"nothing known", "image", "decode image: "),
        (encoded(Image.new("L", (1, 400))), "image", "image aspect ratio 400 exceeds 200"),
    ],
)
def test_anything_but_a_picture_is_refused(
    data: bytes, kind: str, text: str, pieces: Pieces, support: MediaSupport
) -> None:
    assert refused("[img-0]", [Media(data=data, id=0, kind=kind)], pieces, support).startswith(text)


def test_an_item_that_no_marker_names_is_logged_and_not_read(
    pieces: Pieces, support: MediaSupport, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = expanded(support, "a [img-1]", [Media(data=WAVE, id=0), image(1)], cast("Tokenizer", pieces))
    assert found is not None
    assert len(found.spans) == 1
    (record,) = caplog.records
    assert record.message == "media that no marker names"
    assert getattr(record, "attributes") == {"ids": "0"}  # noqa: B009 - of our own logging


def test_five_hundred_pictures_beyond_the_context_cost_a_few_headers(pieces: Pieces, support: MediaSupport) -> None:
    media = [image(0), *(Media(data=b"", id=number, kind="image") for number in range(200, 700))]
    prompt = "[img-0]" * 200 + "".join(f"[img-{number}]" for number in range(200, 700))
    limits = Limits(CONTEXT, 400)
    with pytest.raises(RequestError, match=r"input length \(1001 tokens\) exceeds the model's maximum"):
        next(prepare(CompletionRequest(prompt=prompt, media=media), cast("Tokenizer", pieces), limits, None, support))


def test_nothing_is_read_for_a_client_that_has_left(pieces: Pieces, support: MediaSupport) -> None:
    media, left = [image(0), Media(data=b"damaged", id=1, kind="image")], iter([False, True])
    with pytest.raises(RequestError, match=r"^the client has left$"):
        next(support.expand("[img-0][img-1]", media, cast("Tokenizer", pieces), CONTEXT, lambda: next(left)))


def test_a_request_counts_placeholders_and_compares_names(pieces: Pieces, support: MediaSupport) -> None:
    wire = CompletionRequest(prompt="ab[img-0]c", media=[image(0)])
    request = result_of(prepare(wire, cast("Tokenizer", pieces), Limits(CONTEXT, 304), None, support))
    assert request.prompt == [BOS, *ids_of("ab"), START, *[SOFT] * 6, END, *ids_of("c")]
    assert request.keys == [BOS, *ids_of("ab"), START, *[-1] * 6, END, *ids_of("c")]
    assert request.max_tokens == CONTEXT - len(request.prompt)


def test_markers_without_media_are_text(pieces: Pieces, support: MediaSupport) -> None:
    for sees in (support, NoVision()):
        wire = CompletionRequest(prompt="[img-0]")
        request = result_of(prepare(wire, cast("Tokenizer", pieces), Limits(CONTEXT, 400), None, sees))
        assert request.prompt == [BOS, *ids_of("[img-0]")]
        assert request.shown is None


@pytest.mark.parametrize(
    ("kinds", "why", "text"),
    [
        (["image"], "", "this model does not support image input"),
        (["audio", "image"], "", "this model does not support audio input"),
        ([""], "", "this model does not support media input"),
        (
            ["image"],
            "its vision is unavailable: why",
            "this model does not support image input: its vision is unavailable: why",
        ),
    ],
)
def test_a_model_that_sees_nothing_refuses_by_the_first_kind(kinds: list[str], why: str, text: str) -> None:
    with pytest.raises(RequestError) as error:
        NoVision(why).check([Media(kind=kind) for kind in kinds])
    assert str(error.value) == text
    NoVision(why).check([])


HEAR, HEARD, HEARD_END = 304, 305, 306
SHORT, LONG = wav(noise(5000)), wav(speech(40, [20.0], 8000), 8000, 8)


def hearing(family: SoundFamily, pictures: Gemma4 | None = None) -> MediaSupport:
    """A model that hears, and sees if it has a preparation for pictures."""
    shown = None if pictures is None else FamilyPictures(pictures, START, SOFT, END)
    store = RowStore(shown, decoder=Here())
    refusals = {} if pictures else {"image": "this model does not support image input"}
    heard = Hearing(family, HEAR, HEARD, HEARD_END)
    return MediaSupport(shown, MediaNames(), store, heard, refusals)


def sound(data: bytes, number: int = 0, kind: str = "audio") -> Media:
    return Media(data=data, id=number, kind=kind)


@pytest.mark.parametrize("kind", ["audio", ""])
@pytest.mark.parametrize(("family", "tokens"), [(Gemma4Sound(), 8), (Gemma4UnifiedSound(640), 8)])
def test_a_sound_has_tokens_of_its_own(pieces: Pieces, family: SoundFamily, tokens: int, kind: str) -> None:
    support = hearing(family, Gemma4(budget=70))
    media = [sound(SHORT, 0, kind), image(1, 6, 6)]
    found = expanded(support, "a[img-0]b[img-1]c[img-0]", media, cast("Tokenizer", pieces))
    assert found is not None
    heard, shown = [HEAR, *[HEARD] * tokens, HEARD_END], [START, *[SOFT] * 64, END]
    assert found.ids == [BOS, *b"a", *heard, *b"b", *shown, *b"c", *heard]
    assert [span.item.name for span in found.spans] == [-1, -2, -1]
    assert found.nbytes == len(SHORT) + len(media[1].data)
    assert (found.shift, found.positions(0, 9)) == (0, None)
    other = expanded(support, "a[img-0]", [sound(wav(noise(5000, 2)))], cast("Tokenizer", pieces))
    assert other is not None
    assert other.spans[0].item.name == -3, "a sound of the same length is another one"


def test_the_same_bytes_heard_in_two_ways_have_two_names(pieces: Pieces) -> None:
    names = set()
    for family in (Gemma4Sound(), Gemma4UnifiedSound(640), Gemma4UnifiedSound(320)):
        support = hearing(family)
        found = expanded(support, "[img-0]", [sound(SHORT)], cast("Tokenizer", pieces))
        assert found is not None
        names.add(support.names.digest_of(found.spans[0].item.name))
    assert len(names) == 3


def test_a_long_sound_is_decoded_before_its_length_is_known(pieces: Pieces) -> None:
    support, tokenizer = hearing(Gemma4Sound()), cast("Tokenizer", pieces)
    media = [sound(SHORT, 0), sound(LONG, 1), sound(LONG, 2), sound(speech_of(35), 3), sound(speech_of(36), 4)]
    steps = support.expand("[img-0] [img-1] [img-2] [img-3]", media, tokenizer, 5000)
    prompt = next(steps)
    assert isinstance(prompt, MediaPrompt)
    assert {span.item.data for span in prompt.spans} == {LONG, media[3].data}, "the short one, and one without a marker"
    for decoding in support.decode(prompt, bool):
        decoding.result()
    found = result_of(steps)
    assert found is not None
    clips = [cast("Clip", span.item.clip) for span in found.spans]  # type: ignore[attr-defined]
    assert [len(clip.rows) for clip in clips] == [1, 2, 2, 2]
    assert [span.stop - span.start for span in found.spans] == [clip.tokens for clip in clips]
    assert 1000 <= clips[1].tokens <= 1002
    assert support.store.held_bytes == 4 * 128 * (sum(clips[1].rows) + sum(clips[3].rows)), "nothing is decoded twice"
    assert list(support.decode(found, bool)) != [], "the short one"
    support.drop(found)
    assert support.store.held_bytes == 0
    support.store.close()
    unified = expanded(hearing(Gemma4UnifiedSound(640)), "[img-1]", media, tokenizer, 5000)
    assert unified is not None
    assert len(unified.ids) == 1 + 2 + 1000


def speech_of(seconds: float) -> bytes:
    return wav(speech(seconds, [seconds / 2], 8000), 8000, 8)


def test_nothing_is_decoded_for_a_prompt_that_is_too_long_already(pieces: Pieces) -> None:
    support = hearing(Gemma4Sound())
    found = expanded(support, "[img-0]" + "x" * CONTEXT, [sound(LONG)], cast("Tokenizer", pieces))
    assert found is not None
    assert len(found.ids) > CONTEXT
    assert support.store.held_bytes == 0


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (b"nothing known", "audio", "unrecognized audio format"),
        (WAVE, "audio", "wav: "),
        (wav(noise(160)), "audio", "audio too short"),
        (SHORT, "image", "this model does not support image input"),
        (encoded(Image.new("L", (4, 4))), "", "this model does not support image input"),
        (b"", "video", "this model does not support video input"),
    ],
)
def test_anything_but_a_sound_is_refused(data: bytes, kind: str, text: str, pieces: Pieces) -> None:
    assert refused("[img-0]", [sound(data, 0, kind)], pieces, hearing(Gemma4Sound())).startswith(text)


def test_a_sound_that_is_called_a_picture_is_read_as_one(pieces: Pieces) -> None:
    support = hearing(Gemma4Sound(), Gemma4())
    assert refused("[img-0]", [sound(SHORT, 0, "image")], pieces, support).startswith("decode image: unknown format")
    assert refused("[img-0]", [sound(b"", 0, "video")], pieces, support) == "gemma4 does not support video input"


def test_sounds_of_other_formats_are_decoded_only_if_a_marker_names_them(
    pieces: Pieces, monkeypatch: pytest.MonkeyPatch
) -> None:
    media = [sound(b"ID3" + bytes(500), 0), sound(SHORT, 1), sound(b"fLaC" + bytes(9), 2)]
    tokenizer = cast("Tokenizer", pieces)
    for installed in (True, False):
        monkeypatch.setattr(sound_header, "_has_soundfile", lambda installed=installed: installed)
        support = hearing(Gemma4UnifiedSound(640))
        assert expanded(support, "a[img-1]", media, tokenizer) is not None
        if not installed:
            why = "unrecognized audio format: MP3 needs soundfile"
            assert refused("a[img-0]", media, pieces, support).startswith(why)
            continue
        found = next(support.expand("a[img-0][img-1]", media, tokenizer, CONTEXT))
        assert [span.item.data for span in cast("MediaPrompt", found).spans] == [media[0].data]
