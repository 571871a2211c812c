"""Closes the objects of a JSON schema: an answer has the properties that the schema lists, and no others.

JSON Schema leaves an object open unless `additionalProperties` says otherwise, and few authors do. A model may then
invent properties until its answer is cut. Hosts of Ollama compile schemas in a strict mode that closes objects; so do
we, except where objects are combined: a part of an `allOf` that is closed rules out the properties of all other parts.
"""

from collections.abc import Iterator

Schema = dict[str, object]

_PARTS = ("items", "additionalItems", "additionalProperties", "contains")
_LISTS = ("items", "prefixItems", "allOf", "anyOf", "oneOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_IN_PLACE = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies")
"""Keywords whose schemas describe the same object."""
_MORE = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "dependentRequired")
"""Keywords that say what more properties an object may have."""
_OWN = ("properties", "required", "minProperties", "maxProperties", *_MORE)
_MOST_HOPS = 8


def close_objects(root: Schema) -> None:
    """Adds `"additionalProperties": false` to the objects of `root` that list properties, say nothing about more, and
    are not combined with others. Objects that need a property which they do not list stay open."""
    every = [*subschemas(root)]
    combined = dict[int, Schema]()
    waiting = [schema for schema in every if _combines(schema)]
    while waiting:
        schema = waiting.pop()
        if id(schema) not in combined:
            combined[id(schema)] = schema
            waiting += _in_place(schema, root)
    for schema in every:
        if id(schema) not in combined and _can_be_closed(schema):
            schema["additionalProperties"] = False


def subschemas(schema: Schema) -> Iterator[Schema]:
    """Yields `schema` and the schemas in it that llguidance reads, inner ones first."""
    for key, value in schema.items():
        if isinstance(value, dict):
            inner = [value] if key in _PARTS else value.values() if key in _MAPS else ()
        else:
            inner = value if isinstance(value, list) and key in _LISTS else ()
        for part in inner:
            if isinstance(part, dict):
                yield from subschemas(part)
    yield schema


def resolved(schema: object, root: Schema) -> object:
    """Returns what `schema` refers to within `root`, if it is nothing but a reference; else `schema`."""
    for _ in range(_MOST_HOPS):
        reference = schema.get("$ref") if isinstance(schema, dict) and len(schema) == 1 else None
        if not isinstance(reference, str):
            break
        schema = _target(reference, root)
    return schema


def _target(reference: str, root: Schema) -> object:
    found: object = root
    for name in reference.split("/")[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _combines(schema: Schema) -> bool:
    """Returns True if more than one part of `schema` describes the same object."""
    parts = [key for key in _IN_PLACE if key in schema]
    members = schema.get("allOf")
    several = len(parts) > 1 or (isinstance(members, list) and len(members) > 1)
    return bool(parts) and (several or any(key in schema for key in _OWN))


def _in_place(schema: Schema, root: Schema) -> list[Schema]:
    """Returns the schemas that describe the same object as `schema`."""
    reference = schema.get("$ref")
    parts = [_target(reference, root)] if isinstance(reference, str) else list[object]()
    for key in ("allOf", "anyOf", "oneOf"):
        members = schema.get(key)
        parts += members if isinstance(members, list) else []
    return [part for part in parts if isinstance(part, dict)]


def _can_be_closed(schema: Schema) -> bool:
    properties, required, least = (schema.get(key) for key in ("properties", "required", "minProperties"))
    if not isinstance(properties, dict) or any(key in schema for key in _MORE):
        return False
    needed = required if isinstance(required, list) else []
    enough = len(properties) >= least if isinstance(least, int) else True
    return enough and all(name in properties for name in needed if isinstance(name, str))
