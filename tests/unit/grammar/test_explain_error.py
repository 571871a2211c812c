"""The explanation of a broken schema names the fault and its place. A panic in llguidance fails one request only."""

import json

import pytest

from runner.errors import RequestError
from tests.unit.grammar.walks import accepts, bytes_tokenizer, guide_of

BAD = {"type": "strin"}
GOOD = {"type": "string"}
PANICS = "a(?:ab|a)|aa(?:b|)|é"
STRICT = {"x-guidance": {"lenient": False}}


def told(wanted: object) -> str:
    with pytest.raises(RequestError) as error:
        guide_of(wanted, bytes_tokenizer())
    assert error.value.status == 400
    assert str(error.value).startswith("Format: ")
    return str(error.value)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (BAD, "$"),
        ({"properties": {"a": GOOD, "b": BAD, "c": GOOD}}, "$.properties.b"),
        ({"anyOf": [GOOD, {"items": BAD}]}, "$.anyOf[1].items"),
        ({"$defs": {"x": {"properties": {"y": BAD}}}, "$ref": "#/$defs/x"}, "$.$defs.x.properties.y"),
        (
            {"type": "object", "properties": {**{f"p{number}": GOOD for number in range(500)}, "z": BAD}},
            "$.properties.z",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else "",
)
def test_the_innermost_part_with_the_fault_is_named(schema: object, place: str) -> None:
    text = told(schema)
    assert "Invalid type: strin" in text
    assert f" at `{place}` of the JSON schema" in text


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({**STRICT, "items": {"not": {"const": 0}}}, 'Unimplemented keys: ["not"] - at `$.items`'),
        ({**STRICT, "type": "string", "format": "iri"}, "Unknown format: iri"),
        ({**STRICT, "oneOf": [{"minimum": 1}, {"maximum": 5}]}, "oneOf constraints are not supported"),
        ({"$ref": "#/$defs/none"}, "'/$defs/none' does not exist"),
        ({"type": "string", "minLength": 5, "maxLength": 4}, "minLength (5) is greater than maxLength (4)"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "incompatible types"),
        ({"type": "string", "pattern": "("}, "unterminated group at character 1 - at `$`"),
        ({**STRICT, "type": "object", "minProperties": 2, "properties": {"a": {}}}, "min/maxProperties only supported"),
        ({"x-guidance": {"nonsense": 1}}, "unknown field `nonsense`"),
        ({"required": "a"}, "required"),
        ({"const": 2**70, "type": "strin"}, "Invalid type: strin - at `$`"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_an_error_says_why_a_schema_is_refused(schema: object, reason: str) -> None:
    assert reason in told(schema)


def test_no_text_is_longer_than_a_person_reads() -> None:
    assert len(told({"type": "x" * 100_000})) < 2000
    assert len(told({"type": "regex", "pattern": "(" * 10_000})) < 2000
    assert len(told({"type": "lark", "grammar": "x" * 100_000})) < 2000


def test_a_schema_too_large_to_compile_is_called_too_large() -> None:
    assert "schema too large" in told(
        {"type": "object", "properties": {f"p{number}": GOOD for number in range(20_000)}}
    )


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "lark", "grammar": 'start: X\nX: "aaa" | "a" "aa"'},
        {"pattern": PANICS},
        {"properties": {"a": {"type": "string", "format": "iri"}, "b": {"pattern": PANICS}}},  # in `fault`
    ],
)
def test_a_panic_of_llguidance_is_called_one_and_fails_only_its_own_format(wanted: object) -> None:
    assert "llguidance failed: called `Option::unwrap()`" in told(wanted)
    assert "write equal alternatives only once" in told(wanted)
    assert accepts(GOOD, '"a"')
