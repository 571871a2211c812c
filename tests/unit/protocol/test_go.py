"""The decoder against Go's answers; and in pieces, on bodies of every generation that were spoilt."""

from contextlib import suppress
from ctypes import c_float
from unittest.mock import patch

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from protocol import BadRequestError, CompletionRequest, TooLargeError
from scripts.tools.host.lib import GENERATIONS, Generation, Medium, Request
from scripts.tools.host.lib.requests import encode
from tests.unit.protocol.go_cases import REFUSED, TAKEN
from tests.unit.protocol.reading import PIECE_BYTES, decode_completion

MEGABYTE = 1 << 20
DEEP = 200
"""Levels of nesting that anybody takes; Python gives up below 1000, Go at 10000."""


def seen(body: bytes, piece_bytes: int = PIECE_BYTES) -> dict[str, object] | None:
    """Returns the non-zero fields that the decoder found, by Go's names; None if it refused the body."""
    try:
        request = decode_completion(body, piece_bytes)
    except (BadRequestError, TooLargeError):
        return None
    options = {name: getattr(request.options, name) for name in request.options.__struct_fields__}
    fields = {
        "Prompt": request.prompt,
        "Media": [medium.kind for medium in request.media],
        "Format": bytes(request.format).decode(),
        "Logprobs": request.logprobs,
        "TopLogprobs": request.top_logprobs,
        "IncludeIntermediateMetrics": request.include_intermediate_metrics,
    }
    return {name: value for name, value in {**fields, **options}.items() if value}


@pytest.mark.parametrize(("body", "fields"), TAKEN, ids=[ascii(body) for body, _ in TAKEN])
def test_what_go_takes_is_taken(body: bytes, fields: dict[str, object]) -> None:
    assert seen(body) == fields


@pytest.mark.parametrize("body", REFUSED, ids=ascii)
def test_what_go_refuses_is_refused(body: bytes) -> None:
    assert seen(body) is None


KEYS = st.sampled_from(
    [
        *("Prompt", "prompt", "PROMPT", "Pr\\u006fmpt", "Media", "Options", "options", "Format", "Logprobs"),
        *("toplogprobs", "seed", "Seed", "\u017feed", "stop", "Kind", "kind", "temperature", "top_k", "top_\u212a"),
        *("num_predict", "TopLogprobs", "IncludeIntermediateMetrics", "x", ""),
    ]
)
LITERALS = st.sampled_from(
    [
        *("null", "true", "false", "0", "-0", "1", "-1", "1.0", "1e2", "-0.5", "3.4e38", "1e39", "1e-50", "1e999"),
        *("9223372036854775807", "9223372036854775808", "-9223372036854775809", "9" * 60, "9" * 5000),
        *(
            '""',
            '"a"',
            '"image"',
            r'"\ud800"',
            r'"\ud83d\ude00"',
            r'"\udc00\ud800"',
            r'"\"\\\/\n"',
            '"é😀"',
            "[]",
            "{}",
        ),
        *("NaN", "Infinity", "-Infinity", "01", "1.", "+1", "tru", '"\x01"', r'"\x"', r'"\u12"', '"', "'a'", ""),
    ]
)
SPACE = st.sampled_from(["", "", "", " ", "\t\r\n", "\v"])


def _array(items: list[str]) -> str:
    return f"[{','.join(items)}]"


def _object(members: list[tuple[str, str, str]]) -> str:
    return "{" + ",".join(f'{space}"{key}"{space}:{space}{value}' for key, space, value in members) + "}"


def objects(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(st.tuples(KEYS, SPACE, values), max_size=6).map(_object)


VALUES = st.recursive(LITERALS, lambda v: st.lists(v, max_size=3).map(_array) | objects(v), max_leaves=12)
BODIES = objects(VALUES).map(lambda text: text.encode())
"""JSON of all kinds, with and without the keys that matter."""


@st.composite
def host_bodies(draw: st.DrawFn) -> bytes:
    """Generates bodies that hosts of all generations send."""
    generation: Generation = draw(st.sampled_from(GENERATIONS))
    options = draw(
        st.sampled_from([None, {}, generation.default_options, {"stop": ["a", "b"], "seed": 5, "temperature": 0.7}])
    )
    request = Request(
        draw(st.text()),
        options,
        logprobs=draw(st.booleans()),
        top_logprobs=draw(st.integers(0, 20)),
        media=draw(st.sampled_from([None, (), (Medium(b"x"), Medium(b"y", "audio"))])),
        format=draw(st.sampled_from([None, "", {"type": "object"}])),
        intermediate_metrics=draw(st.booleans()),
    )
    return encode(request, generation)


PIECES = st.sampled_from(
    [
        *(b"", b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b" ", b"\x00", b"\xff", b"\xe2\x82", b"\xed\xa0\x80"),
        *(b"null", b"1.0", b"\\ud800", b"\\udc00", b"\\u", b'"x":1,', b'"Prompt":null,', b'"options":{"seed":3},'),
    ]
)


@st.composite
def spoilt(draw: st.DrawFn, bodies: st.SearchStrategy[bytes]) -> bytes:
    """A body with up to three places where bytes are missing, doubled, or others."""
    body = draw(bodies)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(body)))
        stop = draw(st.integers(start, min(len(body), start + 6)))
        piece = draw(PIECES | st.binary(max_size=3) | st.just(body[start:stop] * 2))
        body = body[:start] + piece + body[stop:]
    return body


@settings(max_examples=100, derandomize=True)
@given(st.data(), st.integers(1, 40), st.integers(0, 12))
def test_pieces_make_no_difference(data: st.DataObject, piece_bytes: int, long_bytes: int) -> None:
    """However short the strings are that count as long ones; of media nothing is kept then."""
    body = data.draw(
        host_bodies().map(lambda sent: sent.replace(b'"Media":null,', b""))
        | spoilt(host_bodies())
        | BODIES
        | spoilt(BODIES)
    )
    assume(b"media" not in body.lower())
    whole = seen(body)
    with patch("protocol.reader._LONG_BYTES", long_bytes):
        assert seen(body, piece_bytes) == whole


@settings(max_examples=150, derandomize=True)
@given(st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_decoded_or_refused_and_nothing_else(body: bytes) -> None:
    with suppress(BadRequestError):
        assert isinstance(decode_completion(body), CompletionRequest)


def test_a_refusal_does_not_keep_the_body_alive() -> None:
    """As the exceptions of json and of UnicodeDecodeError would."""
    with pytest.raises(BadRequestError) as refusal:
        decode_completion(b'{"Prompt":"a"')
    assert refusal.value.__context__ is None


def test_a_number_of_any_length_is_a_number() -> None:
    """Python makes no integer of more than 4300 digits; Go looks at none of those that it does not need."""
    assert seen(b'{"x":[' + b"9" * 5000 + b'],"TopLogprobs":1}') == {"TopLogprobs": 1}
    assert seen(b'{"Options":{"temperature":1' + b"0" * 20 + b"}}") == {"temperature": c_float(1e20).value}
    assert seen(b'{"Options":{"temperature":' + b"9" * 5000 + b"}}") is None
    assert seen(b'{"Options":{"seed":' + b"9" * 5000 + b"}}") is None


@pytest.mark.parametrize("key", ["x", "Prompt"])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_values_are_taken_where_nobody_looks_at_them_and_refused_otherwise(
    key: str, opening: str, closing: str
) -> None:
    deep = f'{{"{key}":{opening * DEEP}1{closing * DEEP}}}'.encode()
    assert seen(deep) == ({} if key == "x" else None)
    levels = 100_000
    assert seen(f'{{"{key}":{opening * levels}1{closing * levels}}}'.encode()) is None
    assert seen(f'{{"{key}":{opening * levels}'.encode()) is None


def _filled(head: bytes, piece: bytes, tail: bytes, size: int) -> bytes:
    return head + piece * (size // len(piece)) + tail


VAST = {
    "keys": (b"{", b'"":0,', b'"":0}'),
    "keys of options": (b'{"Options":{', b'"seed" :0,', b'"seed":0}}'),
    "media": (b'{"Media":[', b"{},", b"{}]}"),
    "stop strings": (b'{"Options":{"stop":[', b'"",', b'""]}}'),
    "numbers of nobody": (b'{"x":[', b"0,", b"0]}"),
    "lists": (b'{"x":[', b"[],", b"[]]}"),
}


@pytest.mark.parametrize("name", VAST)
def test_more_structure_than_any_request_has_is_refused_unread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value costs a hundred bytes of memory and a microsecond or two."""
    head, piece, tail = VAST[name]
    assert seen(head + piece * 16_000 + tail) is not None
    nobodys = '"x"' in head.decode()
    assert (seen(head + piece * 17_000 + tail) is not None) == nobodys
    body = _filled(head, piece, tail, 2 * MEGABYTE)
    monkeypatch.setattr("protocol.golang._top_level", None)  # whoever reads it calls this
    assert seen(body) is None


def test_separators_in_strings_are_text() -> None:
    stop = "," * 20_000
    assert seen(f'{{"Prompt":"{stop}","Options":{{"stop":["{stop}"]}}}}'.encode()) == {"Prompt": stop, "stop": [stop]}


@pytest.mark.parametrize(
    ("head", "piece", "tail"), [(b"{", b" ", b'"TopLogprobs":1}'), (b'{"TopLogprobs":1}', b",", b"")]
)
def test_space_and_what_follows_the_first_value_may_be_long(head: bytes, piece: bytes, tail: bytes) -> None:
    assert seen(_filled(head, piece, tail, MEGABYTE // 2)) == {"TopLogprobs": 1}


@pytest.mark.parametrize("piece", [b"x", rb"\"", b"\\n", b"\\u003c", b'\\":,{[', "é".encode(), b"\xff", b"\\ud800"])
def test_a_prompt_may_be_of_any_length_and_made_of_anything(piece: bytes) -> None:
    body = _filled(b'{"Prompt":"', piece, b'","TopLogprobs":1}', MEGABYTE)
    request = decode_completion(body)
    assert request.top_logprobs == 1
    count = MEGABYTE // len(piece)
    assert request.prompt == decode_completion(_filled(b'{"Prompt":"', piece, b'"}', len(piece))).prompt * count
