"""Structural tags as hosts send them, and answers that follow given tokens."""

from runner.grammar.guide import Guide
from runner.tokenizer import Tokenizer
from tests.unit.grammar.walks import bits

Node = dict[str, object]
SCHEMA: Node = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON: Node = {"type": "json_schema", "json_schema": SCHEMA}
CLOSING = "</think>"
ANSWER = b'{"a": 5}'


def text(value: str) -> Node:
    return {"type": "const_string", "value": value}


def free(*excludes: str) -> Node:
    return {"type": "any_text", "excludes": list(excludes)}


def regex(pattern: str) -> Node:
    return {"type": "regex", "pattern": pattern}


def optional(content: Node) -> Node:
    return {"type": "optional", "content": content}


def either(*elements: Node) -> Node:
    return {"type": "or", "elements": list(elements)}


def sequence(*elements: Node) -> Node:
    return {"type": "sequence", "elements": list(elements)}


def thinking(*closings: str, schema: object = SCHEMA) -> Node:
    """Returns the format that a host sends for a model that thinks."""
    closing = text(closings[0]) if len(closings) == 1 else either(*map(text, closings))
    tail = sequence(closing, {"type": "json_schema", "json_schema": schema})
    return {"type": "structural_tag", "format": sequence(free(*closings), optional(tail))}


def led(guide: Guide, tokenizer: Tokenizer, tokens: list[int]) -> bool:
    """Returns True if the guide accepts the tokens. Forced text may be spelled by other tokens."""
    for token in tokens:
        if guide.complete or token not in bits(guide.mask()):
            return False
        guide.take(token)
    return True


def can_end(guide: Guide, tokenizer: Tokenizer) -> bool:
    return guide.complete or not tokenizer.eos.isdisjoint(bits(guide.mask()))
