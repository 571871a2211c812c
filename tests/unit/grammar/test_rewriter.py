"""Rewritten schemas grow by a bounded number of bytes."""

import json

import pytest

from protocol import Format
from protocol.format import schemas
from runner.grammar.rewriter import pruned, rewritten
from tests.unit.grammar.walks import format_of


def size(wanted: Format) -> int:
    return sum(len(bytes(schema.json_schema)) for schema in schemas(wanted))


def grown(schema: dict[str, object]) -> int:
    return size(rewritten(format_of(schema))) - len(json.dumps(schema))


@pytest.mark.parametrize(
    ("one", "times", "most"),
    [
        ({"items": {"enum": [f"a value of some length {n}" for n in range(5)]}, "uniqueItems": True}, 100, 256 << 10),
        ({"contains": {"const": 1}, "minContains": 4}, 1000, 300 << 10),
    ],
    ids=["sets", "arrays that contain something"],
)
def test_many_schemas_do_not_grow_beyond_the_bound(one: dict[str, object], times: int, most: int) -> None:
    one = {"type": "array", **one}
    assert 4 * grown({"prefixItems": [one]}) < grown({"prefixItems": [one] * times}) < most


def test_neither_do_names_within_names() -> None:
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(6):
        names = [f"n{number}" for number in range(40)]
        schema = {"type": "object", "propertyNames": {"enum": names}, "additionalProperties": schema}
    assert 30_000 < grown(schema) < 256 << 10


KEYWORDS = (
    *("type", "items", "minItems", "maxItems", "contains", "minContains", "propertyNames", "properties", "required"),
    *("additionalProperties", "minProperties", "minimum", "exclusiveMaximum", "pattern", "enum", "const", "$ref"),
    *("minLength", "maxLength", "allOf", "anyOf", "prefixItems", "patternProperties", "multipleOf", "x-guidance"),
)
SCALARS = (None, True, -1, 1.5, 2**70, "", "x", "#/")
NONSENSE: tuple[object, ...] = (*SCALARS, [], [1, []], [{}, None], {}, {"a": 1}, {"": [{}]}, {"enum": [[]]})


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_nonsense_is_left_to_llguidance(keyword: str) -> None:
    few: dict[str, object] = {"type": "boolean"}
    array: dict[str, object] = {"type": "array", "items": few, "uniqueItems": True}
    named: dict[str, object] = {"type": "object", "propertyNames": {"enum": ["a"]}, "properties": {"b": few}}
    for place, value in enumerate(NONSENSE):
        arrays = array, {**array, "contains": few}, {**array, "contains": value, "minContains": 2}
        bases = *arrays, named, {**named, "propertyNames": value}
        part = {**bases[place % len(bases)], keyword: value}
        within = {"items": part}, {"propertyNames": part}, {**named, "propertyNames": {keyword: value}}
        for schema in (part, *within):
            pruned(rewritten(format_of({**schema, "x": 1})))
