"""The values of the key `Format`: structural tags, which newer hosts send (September 2026), and short forms for people.

People may write `"json"`, a JSON schema, or any single node of a structural tag, such as `regex` or `lark`. No JSON
schema has a `type` that is the name of a node.
"""

from collections.abc import Callable, Iterator

import msgspec

_MOST_BYTES = 1 << 20
_MOST_DEPTH = 128
_FORMS = (
    '"json", a JSON schema, {"type": "regex", "pattern": ...}, {"type": "lark", "grammar": ...} or a structural tag'
)
_ANY_OBJECT = b'{"type":"object"}'


class FormatError(ValueError):
    """An invalid `Format`. The message names the fault and the place of the fault."""


class _Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """A part of a structural tag. Each subclass describes the texts that the node allows."""


class JsonSchema(_Node, frozen=True, tag="json_schema"):
    """A JSON text that is valid by the schema."""

    json_schema: msgspec.Raw


class ConstString(_Node, frozen=True, tag="const_string"):
    """Exactly the text `value`."""

    value: str


class AnyText(_Node, frozen=True, tag="any_text"):
    """Any text that contains none of the texts in `excludes`. The text may be empty."""

    excludes: list[str] = []


class OptionalNode(_Node, frozen=True, tag="optional"):
    """The content, or an empty text."""

    content: "Node"


class OrNode(_Node, frozen=True, tag="or"):
    """A text of one of the elements."""

    elements: list["Node"]


class SequenceNode(_Node, frozen=True, tag="sequence"):
    """The texts of all elements, one after the other."""

    elements: list["Node"]


class Regex(_Node, frozen=True, tag="regex"):
    """A text that the regular expression matches from end to end."""

    pattern: str


class Lark(_Node, frozen=True, tag="lark"):
    """A text of `grammar`, which is in llguidance's dialect of Lark. A Lark node must not be inside another node."""

    grammar: str


Node = JsonSchema | ConstString | AnyText | OptionalNode | OrNode | SequenceNode | Regex
Format = Node | Lark


class _StructuralTag(_Node, frozen=True, tag="structural_tag"):
    format: Format


_Tagged = Format | _StructuralTag
_TAGS = frozenset(
    str(kind.__struct_config__.tag)
    for kind in (JsonSchema, ConstString, AnyText, OptionalNode, OrNode, SequenceNode, Regex, Lark, _StructuralTag)
)
_ALONE = frozenset(str(kind.__struct_config__.tag) for kind in (Lark, _StructuralTag))
_decoder = msgspec.json.Decoder(_Tagged)


def decode_format(data: bytes) -> Format | None:
    """Returns the format in the JSON text `data`; None if `data` is empty, null or an empty string.

    Raises:
        FormatError: the value is not a format, a schema is larger than 1 MiB, or the nesting is too deep.
    """
    if data in (b"", b"null", b'""'):
        return None
    try:
        value = msgspec.json.decode(data)
        if value == "json":
            return JsonSchema(msgspec.Raw(_ANY_OBJECT))
        if not isinstance(value, dict):
            raise FormatError(f"Format: expected {_FORMS}, found {data[:40].decode(errors='replace')}")
        kind = value.get("type")
        found = _decoder.decode(data) if isinstance(kind, str) and kind in _TAGS else JsonSchema(msgspec.Raw(data))
        format_ = found.format if isinstance(found, _StructuralTag) else found
        for schema in schemas(format_):
            _refuse_vast(bytes(schema.json_schema))
    except RecursionError:
        raise FormatError(f"Format: nested deeper than {_MOST_DEPTH} levels") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"Format: {_explained(str(error))}") from None
    return format_


def _explained(text: str) -> str:
    """Returns msgspec's message `text`. Adds the valid types, or a hint, to a message about an invalid `type`."""
    if not text.startswith("Invalid value ") or "type`" not in text:
        return text
    if any(f"value '{alone}'" in text for alone in _ALONE):
        return f"{text}, which is no part of another"
    return f"{text}; known are {', '.join(sorted(_TAGS - _ALONE))}"


def schemas(root: Format) -> Iterator[JsonSchema]:
    """Yields every schema in the format `root`. Raises FormatError if nodes are nested too deep."""
    level: list[Format] = [root]
    depth = 0
    while level:
        depth += 1
        if depth > _MOST_DEPTH:
            raise FormatError(f"Format: nested deeper than {_MOST_DEPTH} levels")
        yield from (node for node in level if isinstance(node, JsonSchema))
        level = [child for node in level for child in _children(node)]


def with_schemas(root: Format, change: Callable[[bytes], bytes]) -> Format:
    """Returns a copy of the format in which `change` has replaced the JSON text of each schema."""
    return root if isinstance(root, Lark) else _changed(root, change)


def _changed(node: Node, change: Callable[[bytes], bytes]) -> Node:
    match node:
        case JsonSchema(schema):
            return JsonSchema(msgspec.Raw(change(bytes(schema))))
        case OptionalNode(content):
            return OptionalNode(_changed(content, change))
        case OrNode(elements):
            return OrNode([_changed(each, change) for each in elements])
        case SequenceNode(elements):
            return SequenceNode([_changed(each, change) for each in elements])
    return node


def _children(node: Format) -> list["Node"]:
    match node:
        case OptionalNode(content):
            return [content]
        case OrNode(elements) | SequenceNode(elements):
            return elements
    return []


def _refuse_vast(schema: bytes) -> None:
    if len(schema) > _MOST_BYTES:
        raise FormatError(f"Format: the schema has {len(schema)} bytes; the limit is {_MOST_BYTES}")
    level = _containers([msgspec.json.decode(schema)])
    for _ in range(_MOST_DEPTH):
        level = [child for value in level for child in _containers(value)]
    if level:
        raise FormatError(f"Format: the schema is nested deeper than {_MOST_DEPTH} levels")


def _containers(value: dict[str, object] | list[object]) -> list[dict[str, object] | list[object]]:
    """Returns the objects and arrays that are direct members of `value`."""
    return [child for child in (value.values() if isinstance(value, dict) else value) if isinstance(child, dict | list)]
