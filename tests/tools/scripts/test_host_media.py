"""Pictures through `scripts/host`: their kinds, their markers, and a real model that sees."""

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from scripts.tools.host.go_json import kind_of, marked
from scripts.tools.models.png import png
from scripts.tools.models.sources import write_source
from tests.tools.scripts.test_host_process import Served, ask, served

RED, BLUE = (base64.b64encode(png(40, 30, colour)).decode() for colour in ((250, 0, 0), (0, 0, 250)))
WAVE = base64.b64encode(b"RIFF\4\0\0\0WAVE").decode()


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (png(1, 1, (1, 2, 3)), "image"),
        (b"\xff\xd8\xff\xe0", "image"),
        (b"GIF89a", "image"),
        (b"BM", "image"),
        (b"\0\0\1\0", "image"),
        (b"RIFF\4\0\0\0WEBPVP8 ", "image"),
        (b"RIFF\4\0\0\0WAVE", "audio"),
        (b"ID3\4", "audio"),
        (b"\xff\xfb\x90", "audio"),
        (b"\0\0\0\x1cftypavif", ""),
        (b"\0\0\0\x1cftypheic", ""),
        (b"II*\0", ""),
        (b"RIFF\4\0\0\0AVI ", ""),
        (b"\xff", ""),
        (b"", ""),
    ],
)
def test_kinds_are_those_of_the_host(data: bytes, kind: str) -> None:
    assert kind_of(data) == kind


@pytest.mark.parametrize(
    ("text", "numbers", "template", "built_in"),
    [
        ("look", [0, 1], "[img-0][img-1]look", "[img-0][img-1] look"),
        (" look", [2], "[img-2] look", "[img-2] look"),
        ("", [2], "[img-2]", "[img-2]"),
        ("a [img] b", [0], "a [img-0] b", "a [img-0] b"),
        ("a [img] b [img]", [3, 4, 5], "[img-5]a [img-3] b [img-4]", "[img-5] a [img-3] b [img-4]"),
        ("a [img-0]", [1], "[img-1]a [img-0]", "a [img-0]"),
        ("plain", [], "plain", "plain"),
    ],
)
def test_markers_are_put_as_the_host_puts_them(text: str, numbers: Sequence[int], template: str, built_in: str) -> None:
    assert marked(text, numbers, built_in=False) == template
    assert marked(text, numbers, built_in=True) == built_in


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("model") / "seeing", "qwen3.5-seeing")


@pytest.fixture(scope="module")
def host(seeing: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served([str(seeing)], tmp_path_factory.mktemp("host")) as running:
        yield running


async def test_a_chat_with_a_picture_is_answered(host: Served) -> None:
    options = {"num_predict": 2, "temperature": 0}
    first = {"role": "user", "content": "What is this?"}
    plain = await ask(host, "/api/chat", {"model": "seeing", "messages": [first], "options": options})
    shown = {**first, "images": [RED]}
    answer = await ask(host, "/api/chat", {"model": "seeing", "messages": [shown], "options": options})
    assert (plain.status, answer.status) == (200, 200)
    assert int(str(answer.last["prompt_eval_count"])) > int(str(plain.last["prompt_eval_count"])) + 60
    turn = {"role": "user", "content": "And this?", "images": [BLUE]}
    talk = [shown, {"role": "assistant", "content": "Red."}, turn]
    again = await ask(host, "/api/chat", {"model": "seeing", "messages": talk, "options": options})
    assert int(str(again.last["prompt_eval_cached_count"])) > 60, "the first picture is not read again"
    body = {"model": "seeing", "prompt": "[img] is what?", "images": [BLUE], "options": options}
    assert (await ask(host, "/api/generate", body)).status == 200


@pytest.mark.parametrize(
    ("images", "text"),
    [
        ([WAVE], "qwen3.5 does not support audio input"),
        ([base64.b64encode(png(40, 30, (1, 2, 3))[:-20]).decode()], "decode image: damaged PNG"),
        ([base64.b64encode(b"\0\0\0\x1cftypheic\0\0\0\0").decode()], "convert the image to JPEG or PNG"),
    ],
)
async def test_refusals_of_pictures_reach_the_user(images: list[str], text: str, host: Served) -> None:
    answer = await ask(host, "/api/generate", {"model": "seeing", "prompt": "x", "images": images})
    assert answer.status == 400
    assert text in str(answer.last["error"])
