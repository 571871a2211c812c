"""The reasons why a body is refused: what each says, where it says that it is, and how long it may become."""

import json

import msgspec
import pytest

from protocol import BadRequestError
from protocol.embeddings import decode_embeddings, decode_media
from protocol.refusal import decoded
from protocol.score import decode_decision, decode_score
from tests.unit.protocol.reading import PIECE_BYTES, decode_completion

LONG = "A" * 5000
"""A string that does not stay in the rest."""
REASONS: dict[bytes, str] = {
    b"": "the body is empty",
    b" \n": "the body is empty",
    b"Prompt=hello": "the body must be a JSON object, found Prompt=hello",
    b"[1]": "the body must be a JSON object, found [1]",
    b'{"Prompt":"a"': "invalid JSON at byte 13: expecting ',' or '}', found the end of the body",
    b'{"Prompt":"a", Options:{}}': "invalid JSON at byte 15: expecting a key in double quotes, found `Options:{}}`",
    '{"Prompt":"é" 5}'.encode(): "invalid JSON at byte 15: expecting ',' or '}', found `5}`",
    b'{"a""b"}': "invalid JSON at byte 4: expecting ':', found a string",
    b'{"Prompt":"a\nb"}': r"invalid JSON at byte 12: invalid control character in a string: a line end is written \n",
    b'{"Prompt":5}': "Prompt must be a string, found 5",
    b'{"prompt":["a"]}': "Prompt must be a string, found a list",
    b'{"logprobs":1}': "Logprobs must be true or false, found 1",
    b'{"Options":"x"}': 'Options must be an object, found "x"',
    b'{"Options":{"num_predict":"ten"}}': 'Options.num_predict must be an integer, found "ten"',
    b'{"Options":{"NUM_PREDICT":1.5}}': "Options.num_predict must be an integer, found 1.5",
    b'{"Options":{"seed":"0"}}': 'Options.seed must be an integer, found "0"',
    b'{"Options":{"seed":9223372036854775808}}': "Options.seed must be an integer of 64 bits at most, found"
    " 9223372036854775808",
    b'{"Options":{"top_p":true}}': "Options.top_p must be a number, found true",
    b'{"Options":{"temperature":1e39}}': "Options.temperature must be a number of at most 3.4e38, found 1e+39",
    b'{"Options":{"temperature":-10000000000000000000000000000000000000000}}': "Options.temperature must be a number"
    " of at most 3.4e38, found -1e+40",
    b'{"Options":{"stop":"x"}}': 'Options.stop must be a list of strings, such as ["x"], found "x"',
    b'{"Options":{"stop":["x",{}]}}': "Options.stop[1] must be a string, found an object",
    b'{"Media":{"data":"AAAA"}}': "Media must be a list of objects, found an object",
    b'{"Media":[{},"AAAA"]}': 'Media[1] must be an object, found "AAAA"',
    b'{"Media":[{"data":7}]}': "Media[0].data must be a string in base64, found 7",
    b'{"Media":[{"data":"AA#A"}]}': 'Media[0].data is not base64: found "#" after 2 characters, want A-Z, a-z,'
    " 0-9, + and /, and = up to a multiple of four",
    b'{"Media":[{"data":"AA"}]}': "Media[0].data is not base64: found its end after 2 characters, want"
    " A-Z, a-z, 0-9, + and /, and = up to a multiple of four",
    b'{"Media":[{},{"data":"data:image/png;base64,AAAA"}]}': "Media[1].data is a data URL: send only what follows"
    ' "base64,"',
}


def reason(body: bytes, piece_bytes: int = PIECE_BYTES) -> str:
    with pytest.raises(BadRequestError) as refusal:
        decode_completion(body, piece_bytes)
    return str(refusal.value)


@pytest.mark.parametrize("body", REASONS, ids=ascii)
def test_a_reason_names_the_field_what_is_wanted_and_what_was_found(body: bytes) -> None:
    assert [reason(body, size) for size in (PIECE_BYTES, 5)] == [REASONS[body]] * 2


@pytest.mark.parametrize("piece_bytes", [PIECE_BYTES, 977])
@pytest.mark.parametrize("members", [{}, {"Prompt": LONG}, {"x": LONG, "Media": [{"data": LONG}]}])
def test_places_are_those_of_the_body_whatever_was_taken_out_of_it(
    members: dict[str, object], piece_bytes: int
) -> None:
    body = json.dumps(members)[:-1] + (", " if members else "")
    assert reason(f"{body}Options: 1}}".encode(), piece_bytes).startswith(f"invalid JSON at byte {len(body)}: ")
    for wrong in ("\n", r"\q"):
        text = f'{body}"Prompt":"{LONG}{wrong}{LONG}"}}'
        found = reason(text.encode(), piece_bytes)
        assert found.startswith(f"invalid JSON at byte {text.index(wrong)}: invalid ")


@pytest.mark.parametrize("piece_bytes", [PIECE_BYTES, 977])
def test_long_data_is_named_by_its_item_too(piece_bytes: int) -> None:
    for wrong, text in (
        ("data:image/png;base64," + LONG, 'is a data URL: send only what follows "base64,"'),
        (LONG + "\r\n\u00e9" + LONG, 'is not base64: found "\u00e9" after 5000 characters'),
    ):
        media = [{"data": LONG, "id": 1}, {"id": 2}, {"data": wrong}]
        body = json.dumps({"Options": {"stop": ["a", "b"], "seed": 1}, "Media": media}, ensure_ascii=False)
        assert reason(body.encode(), piece_bytes).startswith(f"Media[2].data {text}")


HOSTILE = {
    "a string for a number": b'{"Options":{"seed":"' + b"\x7f" * 4000 + b'"}}',
    "a number": b'{"Options":{"seed":' + b"9" * 100_000 + b"}}",
    "a key": b'{"Options":{"' + b"k" * 4000 + b'" 5}}',
    "no JSON": b"x" * 100_000,
    "no JSON later": b'{"a":1,' + b"x" * 100_000,
    "base64": b'{"Media":[{"data":"' + b"#" * 100_000 + b'"}]}',
    "depth": b'{"Format":' + b"[" * 100_000,
    "items": b'{"Options":{"stop":[' + b'"",' * 16_000 + b"5]}}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_reason_is_short_whatever_the_body(name: str) -> None:
    assert 10 < len(reason(HOSTILE[name])) < 200


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{", "invalid JSON at byte 1: the body ends too early"),
        (b"{'a'}", "invalid JSON at byte 1: object keys must be strings"),
        (b'{"max_tokens":"9"}', "max_tokens must be an integer, found a string"),
        (b'{"rows":["\x01"]}', "invalid JSON at byte 10: invalid character"),
        (b'{"rows":{}}', "rows must be a list, found an object"),
        (b'{"rows":[{"candidates":["A",1.5]}]}', "rows[0].candidates[1] must be a string, found a number"),
        (b'{"Media":[{"data":5}]}', "Media[0].data must be a string in base64, found an integer"),
        (
            b'{"Media":[{"data":"data:x"}]}',
            'Media[0].data is not base64, or begins as a data URL does: send only what follows "base64,"',
        ),
    ],
)
def test_a_score_is_refused_with_the_field(body: bytes, text: str) -> None:
    with pytest.raises(BadRequestError) as refusal:
        decode_score(body)
    assert str(refusal.value) == text


def test_so_are_decisions_embeddings_and_what_is_nested_too_deep() -> None:
    with pytest.raises(BadRequestError, match=r"^fields\[0\].question must be a list of length 2$"):
        decode_decision(b'{"fields":[{"question":[1]}]}')
    with pytest.raises(BadRequestError, match=r'^dimensions must be an integer, found "2"$'):
        decode_embeddings(b'{"content":"a","dimensions":"2"}')
    with pytest.raises(BadRequestError, match=r"^media\[1\]: illegal base64 data at input byte 4: of a data URL send"):
        decode_media(1, "data:image/png;base64,AAAA")
    with pytest.raises(BadRequestError, match=r"^rows is nested too deep$"):
        decoded(msgspec.json.Decoder(), b"[" * 100_000, "rows")
