"""Random JSON schemas with all features that llguidance supports. Each can be satisfied."""

from collections.abc import Callable, Sequence

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Schema = dict[str, object]
Draw = st.DrawFn
Make = Callable[[Draw, int], Schema]
"""Generates a schema of at most `depth` levels."""

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
PATTERNS = (
    *("^[a-z]+$", "[a-m][n-z]", "^x", "[0-9]$", "^(fo|bar)*$"),
    *(r"\d\d", r"^\w+$", "^[^x]*$", "^é+$", r"^\s?[A-Z]*$"),
)
"""Patterns that each have matches of every length from two on."""
NAMES = ("a", "b", "name", "a b", 'qu"ote', "ü", "", "日本", "back\\slash", "line\nbreak", "ab", "abc")
TEXTS = (*NAMES, "true", "{}", "</think>", "\u0001", "😀", "  ")
STEPS = (1, 2, 3, 7, 10, 0.5, 0.1, 0.25, 2.5)
NODE, LEAF, TEXT = "node", "leaf", "text"
"""Definitions: a recursive one, a flat one, and a text."""
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


@st.composite
def schemas(draw: Draw, depth: int = 2) -> Schema:
    """Generates a complete schema, with definitions to refer to."""
    root = _schema(draw, depth)
    if draw(st.booleans()):
        root["description"] = "what it is for"
    text: Schema = {"type": "string", "minLength": draw(st.integers(0, 3))}
    return {**root, "$defs": {NODE: _node(draw), LEAF: _flat(draw), TEXT: text}}


def _schema(draw: Draw, depth: int) -> Schema:
    kinds: Sequence[Make] = (_array, _object, _map, _any_of, _one_of, _all_of) if depth else ()
    return draw(st.sampled_from((*kinds, _any_flat, _reference)))(draw, depth - 1)


def _flat(draw: Draw) -> Schema:
    makers: Sequence[Callable[[Draw], Schema]] = (_literal, _kinds, _string, _integer, _number)
    return draw(st.sampled_from(makers))(draw)


def _any_flat(draw: Draw, _: int) -> Schema:
    return _flat(draw)


def _reference(draw: Draw, _: int) -> Schema:
    name = draw(st.sampled_from((NODE, LEAF, TEXT)))
    more: Schema = {"maxLength": draw(st.integers(3, 9))} if name == TEXT and draw(st.booleans()) else {}
    return {"$ref": f"#/$defs/{name}", **more}


def _literal(draw: Draw) -> Schema:
    values: list[object] = draw(
        st.lists(st.sampled_from([None, True, False, 0, -7, 1.5, *TEXTS, [], [1, "a"], {}, {"a": [None]}]), min_size=1)
    )
    return {"enum": values} if draw(st.booleans()) else {"const": values[0]}


def _kinds(draw: Draw) -> Schema:
    types = draw(st.lists(st.sampled_from(_TYPES), max_size=3, unique=True))
    return {"type": types if len(types) > 1 or draw(st.booleans()) else types[0]} if types else {}


def _string(draw: Draw) -> Schema:
    schema: Schema = {"type": "string"}
    match draw(st.integers(0, 3)):
        case 0:
            return {**schema, "format": draw(st.sampled_from(FORMATS))}
        case 1 | 2 as kind:
            least = draw(st.integers(0, 5))
            if draw(st.booleans()):
                schema["minLength"] = least
            if draw(st.booleans()):
                schema["maxLength"] = draw(st.integers(max(2, least), 9))
            if kind == 1:
                schema["pattern"] = draw(st.sampled_from(PATTERNS))
    return schema


def _integer(draw: Draw) -> Schema:
    return {"type": "integer", **_bounds(draw, st.integers(-1200, 1200), most_step=10)}


def _number(draw: Draw) -> Schema:
    hundredths = st.integers(-90_000, 90_000).map(lambda value: value / 100)
    return {"type": "number", **_bounds(draw, hundredths, most_step=10)}


def _bounds(draw: Draw, values: SearchStrategy[float], most_step: int) -> Schema:
    """Generates bounds with room for more than one step between them."""
    schema: Schema = {}
    least = draw(values)
    if draw(st.booleans()):
        schema[draw(st.sampled_from(("minimum", "exclusiveMinimum")))] = least
    if draw(st.booleans()):
        schema[draw(st.sampled_from(("maximum", "exclusiveMaximum")))] = least + draw(st.integers(2, 300)) * most_step
    if draw(st.booleans()):
        schema["multipleOf"] = draw(st.sampled_from(STEPS))
    return schema


def _array(draw: Draw, depth: int) -> Schema:
    schema: Schema = {"type": "array"}
    first = [_schema(draw, depth) for _ in range(draw(st.integers(0, 2)))]
    if first:
        schema["prefixItems"] = first
    rest = draw(st.sampled_from(("any", "none", "some")))
    if rest == "some":
        schema["items"] = _schema(draw, depth)
    elif rest == "none":
        schema["items"] = False
    room = len(first) if rest == "none" else 3
    least = draw(st.integers(0, room))
    if draw(st.booleans()):
        schema["minItems"] = least
    if draw(st.booleans()):
        schema["maxItems"] = draw(st.integers(least, 4))
    return schema


def _object(draw: Draw, depth: int) -> Schema:
    names = draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
    schema: Schema = {"type": "object", "properties": {name: _schema(draw, depth) for name in names}}
    required = [name for name in names if draw(st.booleans())]
    if required:
        schema["required"] = draw(st.permutations(required))
    match draw(st.integers(0, 3)):
        case 1:
            schema["additionalProperties"] = False
            if names and not required and draw(st.booleans()):
                schema["minProperties"] = 1
        case 2:
            schema["additionalProperties"] = _schema(draw, depth)
    return schema


def _map(draw: Draw, depth: int) -> Schema:
    schema: Schema = {"type": "object"}
    if draw(st.booleans()):
        schema["patternProperties"] = {"^x": _schema(draw, depth), "^[0-9]+$": _schema(draw, depth)}
    if "patternProperties" not in schema or draw(st.booleans()):
        schema["additionalProperties"] = _schema(draw, depth)
    if draw(st.booleans()):
        schema["minProperties"] = draw(st.integers(0, 2))
    if draw(st.booleans()):
        schema["maxProperties"] = draw(st.integers(2, 4))
    return schema


def _any_of(draw: Draw, depth: int) -> Schema:
    if draw(st.booleans()):
        return {"type": "string", "anyOf": [{"maxLength": 4}, {"pattern": "^x"}], "minLength": draw(st.integers(0, 3))}
    return {"anyOf": [_schema(draw, depth) for _ in range(draw(st.integers(1, 3)))]}


def _one_of(draw: Draw, depth: int) -> Schema:
    """Generates branches that differ in type, or in one property, so that an answer shows which one it follows."""
    if draw(st.booleans()):
        return {"oneOf": [_string(draw), _integer(draw), _array(draw, depth), _object(draw, depth), {"type": "null"}]}
    kinds = draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3, unique=True))
    closed: Schema = {"type": "object", "required": ["kind"], "additionalProperties": False}
    values = [(kind, _schema(draw, depth)) for kind in kinds]
    return {"oneOf": [{**closed, "properties": {"kind": {"const": kind}, "value": value}} for kind, value in values]}


def _all_of(draw: Draw, depth: int) -> Schema:
    match draw(st.integers(0, 3)):
        case 0:
            least: Schema = {"type": "number", "minimum": draw(st.integers(-9, 9))}
            return {"allOf": [least, {"maximum": 50}, {"multipleOf": 5}]}
        case 1:
            return {"allOf": [{"type": "string", "minLength": 1}, {"pattern": draw(st.sampled_from(PATTERNS))}]}
        case 2:
            return {"allOf": [_schema(draw, depth)]}
    halves = [{"type": "object", "properties": {name: _schema(draw, depth)}, "required": [name]} for name in "ab"]
    return {"allOf": halves}


def _node(draw: Draw) -> Schema:
    """Generates a recursive schema: a list or a tree."""
    itself: Schema = {"$ref": f"#/$defs/{NODE}"}
    more: Schema = draw(
        st.sampled_from([itself, {"anyOf": [{"type": "null"}, itself]}, {"type": "array", "items": itself}])
    )
    properties = {"value": _flat(draw), "next": more}
    required = ["value", "next"] if more is not itself and draw(st.booleans()) else ["value"]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
