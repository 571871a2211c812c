"""Seeds, formats, and the data of media that arrive in pieces."""

import json
import re
from base64 import b64encode
from random import Random

import pytest

import protocol.reader
from protocol import BadRequestError, CompletionReader, MediaTooLargeError, decode_format
from protocol.reader import MOST_MEDIA_BYTES
from tests.unit.protocol.reading import decode_completion


@pytest.mark.parametrize(
    ("body", "seed"),
    [
        (b'{"Options":{},"Logprobs":false}', 0),
        (b'{"Options":{"seed":7},"Logprobs":false}', 7),
        (b'{"Options":{"seed":-1},"Logprobs":false}', None),
        (b'{"options":{}}', None),
        (b'{"options":{"seed":0}}', 0),
    ],
)
def test_an_absent_seed_is_zero_only_for_hosts_that_know_logprobs(body: bytes, seed: int | None) -> None:
    assert decode_completion(body).seed == seed


def test_format_keeps_its_own_bytes_and_null_asks_for_none() -> None:
    wanted = decode_completion(b'{"Format":{"Type":"a","type":"b"}}')
    assert bytes(wanted.format) == b'{"Type":"a","type":"b"}'
    assert decode_format(bytes(wanted.format)) is not None
    for body in (b'{"Format":null}', b'{"Format":""}', b"{}"):
        assert decode_format(bytes(decode_completion(body).format)) is None


@pytest.mark.parametrize("size", [0, 1, 2, 3073, 10_000])
@pytest.mark.parametrize("piece", [1, 7, 8192])
def test_the_data_of_media_comes_as_bytes_whatever_the_pieces(size: int, piece: int) -> None:
    data = [Random(size).randbytes(size), b"", Random(size + 1).randbytes(size // 2)]
    items = [{"id": 7 - index, "data": b64encode(each).decode(), "Kind": "image"} for index, each in enumerate(data)]
    body = json.dumps({"Prompt": "[img-7]", "Media": items, "Unknown": [{"data": "A" * 9999}]}).encode()
    reader = CompletionReader(1 << 20)
    held = [reader.feed(body[start : start + piece]) for start in range(0, len(body), piece)]
    request = reader.finish()
    assert [(each.id, each.data) for each in request.media] == [(7, data[0]), (6, data[1]), (5, data[2])]
    assert max(held) < size + size // 2 + 6000, "only once, and not as text"


@pytest.mark.parametrize("size", [30, 30_000])
def test_line_ends_in_base64_are_ignored_as_in_go(size: int) -> None:
    data = Random(0).randbytes(size)
    text = b64encode(data).decode()
    lines = "\r\n".join(text[start : start + 76] for start in range(0, len(text), 76))
    body = json.dumps({"Media": [{"data": lines}]}).encode()
    for piece in (len(body), 977):
        assert decode_completion(body, piece).media[0].data == data


@pytest.mark.parametrize("count", [1, 3000])
@pytest.mark.parametrize("wrong", ["{}*AAA", "{}A", "{}AA", "{}A===", "{}AA==AAAA", "{}AA=A", "{}-_AA", "{}é", "=={}"])
def test_what_is_no_base64_is_refused(wrong: str, count: int) -> None:
    body = json.dumps({"Media": [{"data": wrong.format("AAAA" * count)}]}).encode()
    with pytest.raises(BadRequestError):
        decode_completion(body)


PIECE = 8192


def begun(items: int, size: int) -> bytes:
    """The beginning of a body, as far as the data of its first medium; `items` have `size` bytes each."""
    assert size > 3 * PIECE, "or it would be a short string"
    data = "A" * size
    return json.dumps({"Prompt": "p" * 3 * PIECE, "Media": [{"data": data} for _ in range(items)]}).encode()


def fed_until_refused(reader: CompletionReader, body: bytes) -> tuple[int, str]:
    """Returns how much of a body was fed until its media were too large, all of it if never, and the text."""
    for start in range(0, len(body), PIECE):
        try:
            reader.feed(body[start : start + PIECE])
        except MediaTooLargeError as error:
            return start + PIECE, str(error)
    return len(body), ""


@pytest.mark.parametrize("items", [1, 4])
def test_media_that_will_be_too_large_are_refused_when_they_begin(items: int) -> None:
    body = begun(items, 4 * PIECE)
    whole = MOST_MEDIA_BYTES + 10 * PIECE
    reader = CompletionReader(1 << 20, whole)
    fed, text = fed_until_refused(reader, body)
    assert re.match(rf"the media of the request take 1342\d{{5}} bytes.*the limit is {MOST_MEDIA_BYTES}", text)
    assert fed <= 5 * PIECE
    assert reader.held_bytes < 8 * PIECE


def test_too_large_media_of_unknown_size_are_refused_before_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol.reader, "MOST_MEDIA_BYTES", 10 * PIECE)
    assert fed_until_refused(CompletionReader(1 << 20), begun(2, 4 * PIECE)) == (len(begun(2, 4 * PIECE)), "")
    reader = CompletionReader(1 << 20)
    fed, text = fed_until_refused(reader, begun(90, 4 * PIECE))
    assert "or more" in text
    assert fed <= 16 * PIECE
    assert reader.held_bytes <= 13 * PIECE


def test_a_long_prompt_leaves_media_their_room() -> None:
    body = begun(1, 4 * PIECE)
    reader = CompletionReader(1 << 20, MOST_MEDIA_BYTES + 3 * PIECE)
    assert fed_until_refused(reader, body) == (len(body), "")
