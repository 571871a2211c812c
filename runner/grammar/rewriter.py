"""Rewrites JSON schemas so that llguidance enforces more of their keywords.

Some keywords that llguidance does not know can be expressed by keywords that it knows. An answer to the rewritten
schema always satisfies the original schema, but some values that satisfy the original become impossible; the constants
below bound this. A schema grows by a bounded number of bytes.
"""

import json
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from itertools import combinations, permutations

import msgspec

from protocol.format import Format, with_schemas
from runner.grammar.closed_objects import Schema, close_objects, every_schema, resolved
from runner.grammar.explain_error import fault, is_unsupported
from runner.grammar.format_to_lark import OPTIONS_KEY

_MOST_UNIQUE = 5
"""The most values of items in a `uniqueItems` array. Five make 326 arrays of different items; six 1,957, in 0.3 s."""
_MOST_PLACES = 8
"""The items that `contains` requires must be among this number of first items of an array."""
_MOST_VALUES = 128
_MOST_GROWTH_BYTES = 256 << 10
_LARGEST = 9 * 10**17
_LARGEST_INTEGER = 92 * 10**17
"""The largest bounds of numbers and of integers that llguidance accepts."""
_MOST_STEPS = 3600
"""The largest `multipleOf` that llguidance can combine with bounds, read as an integer without its decimal point."""
_OF_FORMAT = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
    "double-int": (1 - 2**53, 2**53 - 1),
}
"""OpenAPI's name of a format of integers -> the bounds of these integers."""
_COUNTS = [f"{end}{what}" for end in ("min", "max") for what in ("Length", "Items", "Contains", "Properties")]
_NOTES = frozenset(("title", "description", "default", "examples", "$schema", "$id", "$defs", "definitions"))
"""Keywords that do not restrict a value."""
_TYPES = {"string": str, "integer": int, "boolean": bool, "null": type(None)}
_OF_TYPE = {"boolean": (False, True), "null": (None,)}
_LIMITED = (
    ("pattern",),
    ("multipleOf",),
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    ("minProperties", "maxProperties"),
    ("patternProperties", "additionalProperties"),
)
"""Keywords that llguidance knows but cannot always enforce. The keywords of a group are checked together."""


def rewritten(wanted: Format) -> Format:
    """Returns the format with its schemas rewritten. Schemas without options for llguidance also get closed objects."""

    def rewrite(schema: Schema) -> None:
        if OPTIONS_KEY not in schema:
            close_objects(schema)
        _Rewriter(schema).rewrite()

    return with_changed_schemas(wanted, rewrite)


def pruned(wanted: Format) -> Format:
    """Returns the format without the keywords of `_LIMITED` that cannot be enforced. Strict schemas keep theirs."""

    def prune(root: Schema) -> None:
        if is_strict(root):
            return
        for schema in every_schema(root):
            for keys in _LIMITED:
                if any(key in schema for key in keys):
                    _drop_unsupported(schema, keys)

    return with_changed_schemas(wanted, prune)


def is_strict(root: Schema) -> bool:
    """Returns True if the schema's options for llguidance forbid leaving out parts."""
    options = root.get(OPTIONS_KEY)
    return isinstance(options, dict) and options.get("lenient") is False


def with_changed_schemas(wanted: Format, change: Callable[[Schema], None]) -> Format:
    """Returns a copy of the format. `change` is called for each schema of the copy, and changes the schema in place."""

    def changed(text: bytes) -> bytes:
        schema = msgspec.json.decode(text)
        if not isinstance(schema, dict):
            return text
        change(schema)
        return json.dumps(schema).encode()  # msgspec refuses integers of more than 64 bits

    return with_schemas(wanted, changed)


def _drop_unsupported(schema: Schema, keys: Sequence[str]) -> None:
    beside = ("type", "required", "properties", "additionalProperties")
    alone: Schema = {key: schema[key] for key in (*keys, *beside) if key in schema}
    for key in ("properties", "patternProperties"):
        names = alone.get(key)
        if isinstance(names, dict):
            alone[key] = dict.fromkeys(names, True)
    if isinstance(alone.get("additionalProperties"), dict):
        alone["additionalProperties"] = True
    if is_unsupported(fault(alone)):
        for key in keys:
            schema.pop(key, None)


class _Rewriter:
    """Rewrites one schema in place."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._room_bytes = _MOST_GROWTH_BYTES

    def rewrite(self) -> None:
        for schema in every_schema(self._root):
            self._drop_idle_keywords(schema)
            self._tame_numbers(schema)
            self._spell_out_nothing(schema)
            self._spell_out_sets(schema)
            self._place_contained(schema)
            self._list_names(schema)

    def _drop_idle_keywords(self, schema: Schema) -> None:
        if schema.get("uniqueItems") is False:
            del schema["uniqueItems"]
        if "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema):
            for key in ("contains", "minContains", "maxContains"):
                schema.pop(key, None)

    def _tame_numbers(self, schema: Schema) -> None:
        """Writes counts as integers, and writes bounds of numbers so that llguidance can compute with them."""
        for key in _COUNTS:
            count = schema.get(key)
            if isinstance(count, float) and count.is_integer():
                schema[key] = int(count)
        largest = _LARGEST_INTEGER if schema.get("type") == "integer" else _LARGEST
        limits = [_OF_FORMAT[form]] if (form := str(schema.get("format"))) in _OF_FORMAT else []
        if _has_few_steps(schema.get("multipleOf")) and not {"enum", "const"} & schema.keys():
            limits.append((-largest, largest))  # a multiple may need more digits than a number may have
        for least, most in limits:
            low = max([least, *_bounds(schema, "minimum", "exclusiveMinimum")])
            high = min([most, *_bounds(schema, "maximum", "exclusiveMaximum")])
            if low < most and least < high:
                schema["minimum"] = max([least, *_bounds(schema, "minimum")])
                schema["maximum"] = min([most, *_bounds(schema, "maximum")])
        for key, sign in (("minimum", -1), ("exclusiveMinimum", -1), ("maximum", 1), ("exclusiveMaximum", 1)):
            for bound in _bounds(schema, key):
                if bound * sign >= sys.float_info.max:
                    del schema[key]  # every number is within this bound
                elif bound * sign > largest:
                    schema[key] = largest * sign

    def _spell_out_nothing(self, schema: Schema) -> None:
        """Rewrites `"not": {}`, which no value satisfies, in a form that llguidance knows."""
        if schema.get("not") in ({}, True):
            del schema["not"]
            schema["allOf"] = [False]

    def _spell_out_sets(self, schema: Schema) -> None:
        """Replaces `uniqueItems` by a list of all possible arrays if the items have few values."""
        known = {"type", "items", "uniqueItems", "minItems", "maxItems", *_NOTES}
        if schema.get("uniqueItems") is not True or schema.get("type") != "array" or schema.keys() - known:
            return
        values = _values(resolved(schema.get("items"), self._root))
        least, most = schema.get("minItems", 0), schema.get("maxItems", _MOST_UNIQUE)
        if values and len(values) <= _MOST_UNIQUE and isinstance(least, int) and isinstance(most, int):
            lengths = range(max(0, least), min(most, len(values)) + 1)
            arrays = [[*order] for length in lengths for order in permutations(values, length)]
            if arrays and self._fits(values, len(arrays)):
                for key in known.difference(_NOTES):
                    schema.pop(key, None)
                schema["enum"] = arrays

    def _place_contained(self, schema: Schema) -> None:
        """Replaces `contains` by a list of the places, among the first items, that the required items may have."""
        least = schema.get("minContains", 1)
        if "contains" not in schema or not isinstance(least, int) or not 0 < least <= _MOST_PLACES:
            return
        if schema.get("type") != "array" or "maxContains" in schema or "anyOf" in schema:
            return
        item = schema["contains"]
        beginnings = [
            [item if at in places else True for at in range(places[-1] + 1)]
            for places in combinations(range(_MOST_PLACES), least)
        ]
        if self._fits([item] * least + [True] * _MOST_PLACES, len(beginnings)):
            schema["anyOf"] = [{"prefixItems": items, "minItems": len(items)} for items in beginnings]
            schema.pop("minContains", None)
            del schema["contains"]

    def _list_names(self, schema: Schema) -> None:
        """Replaces `propertyNames` by a list of properties, or by a pattern for their names."""
        names = resolved(schema.get("propertyNames", True), self._root)
        if names is True or _pattern(names) == _pattern({}):
            schema.pop("propertyNames", None)
            return
        properties, value = schema.get("properties", {}), schema.get("additionalProperties", True)
        if "patternProperties" in schema or not isinstance(properties, dict):
            return
        known = [name for name in _values(names) if isinstance(name, str)]
        if known and self._fits(value, len(known)):
            listed = [name for name in dict.fromkeys([*properties, *known]) if name in known]
            schema["properties"] = {name: properties.get(name, value) for name in listed}
        elif (pattern := _pattern(names)) and not properties:
            schema["patternProperties"] = {pattern: value}
        else:
            return
        schema["additionalProperties"] = False
        del schema["propertyNames"]

    def _fits(self, part: object, times: int) -> bool:
        """Returns True if the schema may grow by `times` copies of `part`, and then counts their bytes."""
        nbytes = len(json.dumps(part)) * times
        if nbytes > self._room_bytes:
            return False
        self._room_bytes -= nbytes
        return True


def _bounds(schema: Schema, *keys: str) -> list[float]:
    """Returns the numbers that these keywords have. Booleans, which draft 4 allows for some, are left out."""
    found = [schema.get(key) for key in keys]
    return [bound for bound in found if isinstance(bound, int | float) and not isinstance(bound, bool)]


def _has_few_steps(multiple: object) -> bool:
    if isinstance(multiple, bool) or not isinstance(multiple, int | float):
        return False
    return 0 < int(f"{Decimal(str(multiple)):f}".replace(".", "")) <= _MOST_STEPS


def _values(schema: object) -> list[object]:
    """Returns all values that satisfy `schema`, each once; empty unless `schema` lists values of one simple type."""
    if not isinstance(schema, dict) or schema.keys() - {"enum", "const", "type", *_NOTES}:
        return []
    kind = schema.get("type")
    values = schema.get("enum", _OF_TYPE.get(str(kind), ()))
    values = [schema["const"]] if "const" in schema else values
    if not isinstance(values, list | tuple) or len(values) > _MOST_VALUES:
        return []
    types = {type(value) for value in values}
    wanted = {_TYPES.get(str(kind))} if kind is not None else types
    return [*dict.fromkeys(values)] if types == wanted and len(types) == 1 and types <= {*_TYPES.values()} else []


def _pattern(schema: object) -> str:
    """Returns a regular expression for the texts that satisfy `schema`; "" if this function cannot write one."""
    if not isinstance(schema, dict) or schema.get("type", "string") != "string":
        return ""
    rest = schema.keys() - {"type", *_NOTES}
    if rest == {"pattern"}:
        return str(schema["pattern"])
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return f"^[^]{{{least},{most}}}$" if rest <= {"minLength", "maxLength"} else ""
