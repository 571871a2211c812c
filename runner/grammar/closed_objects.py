"""Closes the objects of a JSON schema, so that an answer has only properties that the schema lists.

By the JSON Schema standard, an object may have any further properties unless `additionalProperties` is false, and few
authors write that. A model may then invent properties until its answer is cut. Ollama's hosts close objects, and so
does this runner. It does not close combined objects, such as the parts of an `allOf`: a closed part would forbid the
properties that only other parts list.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

Schema = dict[str, object]

_PARTS = ("items", "additionalItems", "additionalProperties", "contains")
_LISTS = ("items", "prefixItems", "allOf", "anyOf", "oneOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_IN_PLACE = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies")
"""Keywords with schemas that describe the same object as the schema that has the keyword."""
_MORE = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "$dynamicRef")
"""Keywords that allow an object further properties, unless their value is false."""
_OWN = ("properties", "required", "minProperties", "maxProperties", "dependentRequired", *_MORE)
_CHILDREN = (*_PARTS, "prefixItems", "properties", "patternProperties")
_ABOUT_OBJECTS = {*_PARTS, *_LISTS, *_MAPS, *_IN_PLACE, *_OWN}
_MOST_HOPS = 8


def close_objects(root: Schema) -> None:
    """Adds `"additionalProperties": false` to each object of `root` that lists all properties it requires, and that is
    not combined with an object that has other properties."""
    every = every_schema(root)
    combined = _combined(every, root)
    for schema in every:
        if id(schema) not in combined and _asks_within(schema, schema.get("properties")):
            schema["additionalProperties"] = False


def every_schema(root: Schema) -> list[Schema]:
    """Returns `root` and the schemas in it that llguidance reads: inner schemas before outer ones, and last the schemas
    that only a `$ref` leads to."""
    found = dict[int, Schema]()
    waiting: list[object] = [root]
    while waiting:
        part = waiting.pop()
        for schema in _within(part) if isinstance(part, dict) and id(part) not in found else ():
            if id(schema) not in found:
                found[id(schema)] = schema
                waiting.append(_target(schema.get("$ref"), root))
    return [*found.values()]


def _within(schema: Schema) -> Iterator[Schema]:
    for key, value in schema.items():
        if isinstance(value, dict):
            inner = [value] if key in _PARTS else value.values() if key in _MAPS else ()
        else:
            inner = value if isinstance(value, list) and key in _LISTS else ()
        for part in inner:
            if isinstance(part, dict):
                yield from _within(part)
    yield schema


def resolved(schema: object, root: Schema) -> object:
    """Returns the part of `root` to which `schema` refers if its only keyword is `$ref`; else `schema` itself."""
    for _ in range(_MOST_HOPS):
        if not isinstance(schema, dict) or schema.keys() != {"$ref"}:
            break
        schema = _target(schema["$ref"], root)
    return schema


def _target(reference: object, root: Schema) -> object:
    found: object = root if isinstance(reference, str) else None
    for name in str(reference).split("/")[1:]:
        if isinstance(found, list):
            found = dict(zip(map(str, range(len(found))), found, strict=True)).get(name)
        else:
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _combines(schema: Schema) -> bool:
    """Returns True if several parts of `schema` describe the same object, or the same item of an array."""
    parts = [key for key in _IN_PLACE if key in schema]
    members = schema.get("allOf")
    several = len(parts) > 1 or (isinstance(members, list) and len(members) > 1)
    return "contains" in schema or (bool(parts) and (several or any(key in schema for key in _OWN)))


_Ways = frozenset[tuple[int, int]]
"""The choices among options that lead to a schema. Each is the id of an `anyOf` or `oneOf` list, and an index in it."""


def _combined(every: Sequence[Schema], root: Schema) -> set[int]:
    """Returns the ids of the schemas that must stay open: each describes the same value as another schema, and does not
    list every property that the other one lists or requires."""
    combined, seen = set[int](), set[frozenset[int]]()
    waiting = [[schema] for schema in every if _combines(schema)]
    while waiting:
        heads = waiting.pop()
        if (key := frozenset(map(id, heads))) not in seen:
            seen.add(key)
            parts = _with_parts(heads, root)
            whole = (head for head in heads if all(_asks_within(part, head.get("properties")) for part, _ in parts))
            combined |= {id(part) for part, _ in parts}.difference(map(id, whole))
            waiting += _inner_pairs(parts, root)
    return combined


def _with_parts(heads: Sequence[Schema], root: Schema) -> list[tuple[Schema, _Ways]]:
    """Returns `heads` and all schemas that describe the same object as one of them. Each appears once."""
    found = dict[int, tuple[Schema, _Ways]]()
    waiting = [(head, _Ways()) for head in heads]
    while waiting:
        schema, ways = waiting.pop()
        known = found[id(schema)][1] if id(schema) in found else None
        if known is None or not known <= ways:
            found[id(schema)] = schema, ways if known is None else ways & known
            waiting += [(part, ways | way) for part, way in _in_place(schema, root)]
    return [*found.values()]


def _in_place(schema: Schema, root: Schema) -> list[tuple[Schema, _Ways]]:
    """Returns the schemas that `schema` applies to its own object."""
    found: list[tuple[object, _Ways]] = [(_target(schema.get("$ref"), root), _Ways())]
    for key in ("allOf", "anyOf", "oneOf"):
        members = schema.get(key)
        for at, part in enumerate(members if isinstance(members, list) else ()):
            found.append((part, _Ways() if key == "allOf" else _Ways([(id(members), at)])))
    found += [(schema.get(key), _Ways()) for key in ("if", "then", "else")]
    for key in ("dependentSchemas", "dependencies"):
        members = schema.get(key)
        found += [(part, _Ways()) for part in (members.values() if isinstance(members, dict) else ())]
    return [(part, ways) for part, ways in found if isinstance(part, dict)]


def _inner_pairs(parts: Sequence[tuple[Schema, _Ways]], root: Schema) -> Iterator[list[Schema]]:
    """Yields each pair of schemas, inside `parts`, that may describe the same property or the same item."""
    named, others = {"": list[tuple[Schema, _Ways]]()}, list[tuple[Schema, _Ways]]()
    for schema, ways in parts:
        for key in _CHILDREN:
            value = schema.get(key)
            by_name = key == "properties" or isinstance(value, list)
            listed = value if isinstance(value, list) else [value]
            inner = value.items() if isinstance(value, dict) and key in _MAPS else enumerate(listed)
            for name, each in inner:
                child = resolved(each, root)
                if isinstance(child, dict) and child.keys() & _ABOUT_OBJECTS:
                    (named.setdefault(str(name), []) if by_name else others).append((child, ways))
    for children in named.values():
        for (left, to_left), (right, to_right) in combinations([*children, *others], 2):
            excluded = any(a == b and at != to for a, at in to_left for b, to in to_right)
            if left is not right and not excluded:
                yield [left, right]


def _asks_within(schema: Schema, properties: object) -> bool:
    """Returns True if an object with only the names in `properties` can have all that `schema` lists or requires."""
    if not isinstance(properties, dict) or any(schema.get(key, False) is not False for key in _MORE):
        return False
    listed, *needs = (schema.get(key) for key in ("properties", "dependentRequired", "dependencies"))
    lists = [schema.get("required"), *(each for need in needs if isinstance(need, dict) for each in need.values())]
    names = [
        *(listed if isinstance(listed, dict) else ()),
        *(name for each in lists if isinstance(each, list) for name in each),
    ]
    least = schema.get("minProperties")
    enough = len(properties) >= least if isinstance(least, int) else True
    return enough and all(name in properties for name in names if isinstance(name, str))
