"""`Format`: the structural tags of hosts, what a person writes by hand, and what is refused, with the place of it."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.format import (
    AnyText,
    ConstString,
    Format,
    FormatError,
    JsonSchema,
    Lark,
    OptionalNode,
    OrNode,
    Regex,
    SequenceNode,
    decode_format,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
MOST_BYTES = 1 << 20
MOST_DEPTH = 128


def decoded(wanted: object) -> Format | None:
    return decode_format(json.dumps(wanted).encode())


def raw(schema: object) -> JsonSchema:
    return JsonSchema(msgspec.Raw(json.dumps(schema).encode()))


def refused(wanted: object) -> str:
    with pytest.raises(FormatError) as error:
        decoded(wanted)
    return str(error.value)


TEXT = {"type": "const_string", "value": "x"}
NODES: list[tuple[object, Format]] = [
    ({"type": "json_schema", "json_schema": SCHEMA}, raw(SCHEMA)),
    ({"type": "json_schema", "json_schema": True}, raw(True)),
    (TEXT, ConstString("x")),
    ({"type": "any_text"}, AnyText([])),
    ({"type": "any_text", "excludes": ["a", "b"]}, AnyText(["a", "b"])),
    ({"type": "optional", "content": TEXT}, OptionalNode(ConstString("x"))),
    ({"type": "or", "elements": [TEXT, {"type": "any_text"}]}, OrNode([ConstString("x"), AnyText([])])),
    ({"type": "sequence", "elements": [TEXT]}, SequenceNode([ConstString("x")])),
    ({"type": "sequence", "elements": []}, SequenceNode([])),
    ({"type": "regex", "pattern": "a+"}, Regex("a+")),
    ({"type": "lark", "grammar": 'start: "a"'}, Lark('start: "a"')),
]


@pytest.mark.parametrize(("node", "meant"), NODES)
def test_a_node_means_the_same_by_itself_and_in_a_structural_tag(node: object, meant: Format) -> None:
    assert decoded(node) == meant
    assert decoded({"type": "structural_tag", "format": node}) == meant


def test_an_object_that_is_no_node_is_a_schema_the_word_json_means_any_object_and_nothing_means_nothing() -> None:
    for schema in ({}, SCHEMA, {"type": ["string", "null"]}, {"type": 5}):
        assert decoded(schema) == raw(schema)
    assert decoded("json") == JsonSchema(msgspec.Raw(b'{"type":"object"}'))
    assert {decode_format(data) for data in (b"", b"null", b'""')} == {None}


@pytest.mark.parametrize("wanted", ["yaml", 5, [1, "a"], "JSON"])
def test_what_has_none_of_the_forms_is_told_the_forms(wanted: object) -> None:
    text = refused(wanted)
    assert json.dumps(wanted) in text
    assert all(form in text for form in ('"json"', "JSON schema", "regex", "lark", "structural tag"))


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"type": "structural_tag", "format": {"type": "xml"}}, ["'xml'", "$.format", "any_text, const_string"]),
        ({"type": "structural_tag", "format": SCHEMA}, ["'object'", "$.format", "json_schema"]),
        ({"type": "structural_tag"}, ["missing required field `format`"]),
        ({"type": "const_string"}, ["`value`"]),
        ({"type": "optional", "content": {"type": "const_string", "value": 5}}, ["$.content.value", "`int`"]),
        ({"type": "or", "elements": [TEXT, {"type": "tag"}]}, ["'tag'", "$.elements[1]"]),
        ({"type": "sequence", "elements": [TEXT, {"value": "x"}]}, ["$.elements[1]", "`type`"]),
        ({"type": "sequence", "elements": [{"type": "lark", "grammar": ""}]}, ["'lark'", "$.elements[0].type", "part"]),
        ({"type": "any_text", "excludes": [5]}, ["$.excludes[0]"]),
        ({"type": "any_text", "excludes": [], "max_tokens": 5}, ["`max_tokens`"]),
    ],
)
def test_what_is_wrong_with_a_node_is_told_with_its_place(wanted: object, told: list[str]) -> None:
    text = refused(wanted)
    assert text.startswith("Format: ")
    assert all(each in text for each in told)


def test_one_mebibyte_of_schema_is_taken_and_not_a_byte_more() -> None:
    def filled(size: int) -> bytes:
        return b'{"title":"' + b"x" * (size - 12) + b'"}'

    for wrapped in (b"%b", b'{"type":"json_schema","json_schema":%b}'):
        assert decode_format(wrapped % filled(MOST_BYTES)) is not None
        with pytest.raises(FormatError, match=f"{MOST_BYTES + 1} bytes; the limit is {MOST_BYTES}"):
            decode_format(wrapped % filled(MOST_BYTES + 1))


@pytest.mark.parametrize(("opening", "closing"), [('{"items":', "}"), ('{"anyOf":[', "]}"), ('{"a":[[', "]]}")])
def test_a_schema_of_128_levels_is_taken_and_not_one_more(opening: str, closing: str) -> None:
    each = opening.count("{") + opening.count("[")
    times, over = divmod(MOST_DEPTH, each)
    deepest = f"{opening * times}{'[' * over}1{']' * over}{closing * times}"
    assert decode_format(deepest.encode()) is not None
    with pytest.raises(FormatError, match="deeper than 128"):
        decode_format(deepest.replace("1", "[1]").encode())


@pytest.mark.parametrize("kind", ["optional", "sequence", "or"])
def test_nodes_of_128_levels_are_taken_and_not_one_more(kind: str) -> None:
    def nested(levels: int) -> object:
        node: object = {"type": "any_text"}
        for _ in range(levels - 1):
            node = {"type": kind, **({"content": node} if kind == "optional" else {"elements": [node]})}
        return node

    assert decoded(nested(MOST_DEPTH)) is not None
    assert decoded({"type": "structural_tag", "format": nested(MOST_DEPTH)}) is not None
    assert "deeper than 128" in refused(nested(MOST_DEPTH + 1))


@pytest.mark.parametrize("unit", [b"[", b'{"a":', b'{"type":"optional","content":'])
def test_what_no_stack_could_hold_is_refused(unit: bytes) -> None:
    with pytest.raises(FormatError):
        decode_format(unit * 100_000)
    close = {b"[": b"]"}.get(unit, b"}")
    with pytest.raises(FormatError):
        decode_format(unit * 50_000 + b"1" + close * 50_000)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "format", "elements", "content", "excludes", "value", "json_schema", "pattern"])
            | st.text(),
            inner
            | st.sampled_from(["structural_tag", "sequence", "or", "optional", "any_text", "const_string", "regex"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


def tried(data: bytes) -> Format | FormatError | None:
    try:
        return decode_format(data)
    except FormatError as error:
        return error


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()) | st.text().map(str.encode))
def test_garbage_is_a_format_or_a_format_error(data: bytes) -> None:
    found = tried(data)
    assert found is None or isinstance(found, Format) or str(found).startswith("Format: ")


def test_bytes_that_are_no_text_are_refused() -> None:
    assert isinstance(tried(b'{"\x80type": "object"}'), FormatError)
    assert isinstance(tried(b'{"title": "\xff"}'), FormatError)
