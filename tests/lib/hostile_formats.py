"""Hostile formats: each explodes in another place of the grammar compiler, if nothing stops it."""

import json

_LETTERS = 60
_AMBIGUOUS = "\n".join(
    [
        f'start: s\ns: {" | ".join(f"n{i} s n{i}" for i in range(_LETTERS))} | "1"',
        *(f"n{i}: /[0-9]/ | n{(i + 1) % _LETTERS} n{(i + 7) % _LETTERS}" for i in range(_LETTERS)),
    ]
)


def _text(value: str) -> object:
    return {"type": "const_string", "value": value}


def _behind_any_text(*elements: object) -> object:
    return {"type": "sequence", "elements": [{"type": "any_text"}, *elements]}


FORMATS: dict[str, object] = {
    "a large divisor": {"type": "integer", "multipleOf": 62620733},
    "another large divisor": {"type": "integer", "multipleOf": 62620741},
    "divisors that have to agree": {"allOf": [{"type": "integer", "multipleOf": m} for m in (9973, 9967, 9949)]},
    "10,000 optional properties": {"properties": {f"p{number}": {"type": "integer"} for number in range(10_000)}},
    "optional texts without an end": _behind_any_text(
        *[{"type": "optional", "content": _text("")}] * 60, {"type": "or", "elements": []}
    ),
    "3,000 empty texts": _behind_any_text(*[_text("")] * 3000),
    "free texts that branch": {
        "type": "sequence",
        "elements": [
            {"type": "any_text", "excludes": ["x"]},
            {"type": "or", "elements": [_text(f"x{number}") for number in range(60)]},
        ]
        * 8,
    },
    "an ambiguous grammar": {"type": "lark", "grammar": _AMBIGUOUS},
    "an intersection": {
        "type": "lark",
        "grammar": "start: A\nA: " + " & ".join(f"/(.*[ab]){{{count}}}.*/" for count in range(3, 30)),
    },
    "a pattern that remembers": {"type": "string", "pattern": "^(a|b)*a(a|b){200}$"},
    "2,000 alternatives": {
        "anyOf": [
            {"properties": {f"k{number}": {"type": "integer"}}, "required": [f"k{number}"]} for number in range(2000)
        ]
    },
    "repetitions of repetitions": {"type": "regex", "pattern": "((((a{1,90}){1,90}){1,90}){1,90}){1,90}"},
    "100 levels": json.loads('{"properties": {"a": ' * 60 + "{}" + "}}" * 60),
    "a hundred thousand letters": _text("a" * 100_000),
    "a rule that goes round": {"type": "lark", "grammar": "start: a\na: b\nb: a | a a"},
}
"""Some cannot be compiled in any time, some not followed, some are only large; by what they are."""
