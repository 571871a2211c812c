"""Incremental UTF-8 against the vectors of docs/internals/wire.md, 5 and against Go's rules written out byte by
byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.tokenizer.detokenizer import Utf8Stream, decode_utf8

VECTORS = [
    (["E3 81", "93 E3", "82 93"], ["", "こ", "ん"]),
    (["F0 9F", "98", "80"], ["", "", "😀"]),
    (["FF", "41"], ["\ufffd", "A"]),
    (["E2 82", "41"], ["", "\ufffd\ufffdA"]),
    (["ED", "A0", "80"], ["", "\ufffd\ufffd", "\ufffd"]),
    (["C0 80"], ["\ufffd\ufffd"]),
    (["F4 90 80 80"], ["\ufffd\ufffd\ufffd\ufffd"]),
    (["F0 9F 98", "E3", "81 93"], ["", "\ufffd\ufffd\ufffd", "こ"]),
]

SECOND_BYTE = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}
"""Leading bytes after which the second byte has a narrower range than 80..BF."""

BORDER_BYTES = bytes.fromhex("41 80 8F 90 9F A0 BF C0 C2 E0 E3 ED EF F0 F4 F5")
"""One byte of every kind that a decoder treats differently."""

awkward_bytes = st.lists(st.sampled_from(BORDER_BYTES), max_size=12).map(bytes)
any_bytes = st.one_of(st.binary(max_size=16), awkward_bytes, st.text(max_size=6).map(str.encode))


def go_next(data: bytes) -> tuple[str, int] | None:
    """Returns Go's next rune and its width, (U+FFFD, 1) for a bad byte; None where `utf8.FullRune` is false."""
    lead = data[0]
    if lead < 0x80:
        return chr(lead), 1
    width = 2 if 0xC2 <= lead <= 0xDF else 3 if 0xE0 <= lead <= 0xEF else 4 if 0xF0 <= lead <= 0xF4 else 0
    if not width:
        return "\ufffd", 1
    value = lead & (0x7F >> width)
    for place in range(1, width):
        if place == len(data):
            return None
        low, high = SECOND_BYTE.get(lead, (0x80, 0xBF)) if place == 1 else (0x80, 0xBF)
        if not low <= data[place] <= high:
            return "\ufffd", 1
        value = value << 6 | data[place] & 0x3F
    return chr(value), width


def go_flush(data: bytes) -> tuple[str, bytes]:
    """Returns all complete or invalid runes of `data`, and the tail that may still become one."""
    text = ""
    while data:
        rune = go_next(data)
        if rune is None:
            break
        text += rune[0]
        data = data[rune[1] :]
    return text, data


def feed_all(chunks: list[bytes]) -> list[str]:
    stream = Utf8Stream()
    return [stream.feed(chunk) for chunk in chunks]


@pytest.mark.parametrize(("chunks", "texts"), VECTORS)
def test_vectors_of_the_protocol(chunks: list[str], texts: list[str]) -> None:
    assert feed_all([bytes.fromhex(chunk) for chunk in chunks]) == texts


@given(st.lists(any_bytes, max_size=6))
def test_every_chunk_gives_what_go_gives(chunks: list[bytes]) -> None:
    pending, expected = b"", []
    for chunk in chunks:
        text, pending = go_flush(pending + chunk)
        expected.append(text)
    assert feed_all(chunks) == expected


@given(any_bytes)
def test_decoded_alone_an_incomplete_end_is_one_replacement_per_byte(data: bytes) -> None:
    text, tail = go_flush(data)
    rest = ""
    while tail:  # the end is known now: the first byte fails, the rest is read on its own
        more, tail = go_flush(tail[1:])
        rest += "\ufffd" + more
    assert decode_utf8(data) == text + rest


@pytest.mark.parametrize("before", ["", "A", "👩\u200d👩"])
def test_an_incomplete_end_is_dropped(before: str) -> None:
    stream = Utf8Stream()
    assert stream.feed(before.encode() + b"\xf0\x9f\x91") == before
    assert stream.finish() == ""


def test_an_incomplete_end_of_a_joined_character_is_one_replacement() -> None:
    stream = Utf8Stream()
    assert stream.feed("👩\u200d".encode()) == "👩\u200d"
    assert stream.feed(b"\xf0\x9f\x91") == ""
    assert stream.finish() == "\ufffd"
