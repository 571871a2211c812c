"""Bounds the lengths of numbers by a second grammar, since llguidance itself cannot bound them. That grammar is the
format with any JSON, but no long number, in place of each schema. An answer must satisfy both grammars."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal

import msgspec
from llguidance import LLMatcher

from protocol.format import Format, Lark, schemas
from runner.grammar.format_to_lark import lark_text

_JSON = """json: STRING | NUMBER | "true" | "false" | "null" | object | array
object: "{" (member (", " member)*)? "}"
member: STRING ": " json
array: "[" (json (", " json)*)? "]"
STRING: /"(\\\\.|[^"\\\\])*"/
NUMBER: /(-9223372036854775808|-?(WHOLE))(\\.[0-9]{1,PLACES}[1-9]?)?([eE](\\+?EXPONENT|-[0-9]{1,3}))?/
"""
LONG_NUMBER = re.compile(rb"[0-9]{19}|[eE][+-]?[0-9]{3}")
"""Matches a part of every number that is too long."""
NUMBER_END = re.compile(rb"[0-9](?:\.|[eE][+-]?)?\Z")
"""Matches a text after which a token may make a number too long, unless LONG_NUMBER matches the token itself."""
MOST_NUMBER_END = len("0e+")
ANY_END = re.compile(rb"\Z")
_PLACES = 20
"""The most digits of a fraction: enough to tell apart all float64 from 0.0001 on. A fraction of this length must not
end in 0: a number that must be greater than a bound might then need another digit."""
_EXPONENT = "([0-9]{1,2}|[01][0-9]{2}|2[0-7][0-9])"
"""An exponent of at most 279: every int64 with such an exponent is a finite float64."""
_LARGEST = str(2**63 - 1)
_INT64 = "|".join(
    ["0", f"[1-9][0-9]{{0,{len(_LARGEST) - 2}}}", _LARGEST]
    + [
        f"{_LARGEST[:at]}[{int(not at)}-{int(digit) - 1}][0-9]{{{len(_LARGEST) - at - 1}}}"
        for at, digit in enumerate(_LARGEST)
        if digit != "0"
    ]
)


def bounds_text(root: Format, special: Mapping[str, int]) -> str:
    """Returns a grammar that allows any JSON for each schema of `root`, but no long number. Whole parts of numbers fit
    an int64, or are as long as the longest number in the schemas. Returns "" if `root` has no schema."""
    found = [msgspec.json.decode(schema.json_schema) for schema in schemas(root)]
    if isinstance(root, Lark) or not found:
        return ""
    numbers = [f"{Decimal(str(number)):f}".lstrip("-").partition(".") for number in _numbers(found)]
    whole = max([len(whole) for whole, _, _ in numbers], default=0)
    fraction = max([len(fraction) + 1 for _, _, fraction in numbers], default=0)
    parts = {
        "WHOLE": f"0|[1-9][0-9]{{0,{whole - 1}}}" if whole > len(_LARGEST) else _INT64,
        "PLACES": str(max(fraction, _PLACES - 1)),
        "EXPONENT": _EXPONENT,
    }
    number = re.sub("|".join(parts), lambda part: parts[part[0]], _JSON)
    return lark_text(root, special, json="json") + number


def _numbers(value: object) -> Iterator[int | float]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


class NumberBounds:
    """Follows an answer through the second grammar, and removes tokens that make numbers too long from masks."""

    def __init__(self, matcher: LLMatcher, spell: Callable[[int], bytes], where: re.Pattern[bytes]) -> None:
        """Takes over `matcher`, which is at the beginning of the second grammar. `spell` returns the bytes of a token.
        Masks are narrowed only after texts that match `where`, since that is slow."""
        self._matcher = matcher
        self._spell = spell
        self._where = where
        self._end = b""

    def copy(self) -> "NumberBounds":
        """Returns an independent copy at the same position."""
        copied = NumberBounds(self._matcher.deep_copy(), self._spell, self._where)
        copied._end = self._end
        return copied

    def reset(self) -> None:
        """Moves back to the beginning of the answer."""
        self._matcher.reset()
        self._end = b""

    def consume(self, tokens: Sequence[int]) -> None:
        """Advances by `tokens` of the answer."""
        self._matcher.consume_tokens([*tokens])
        self._end = b"".join([self._end, *map(self._spell, tokens)])[-MOST_NUMBER_END:]

    def narrowed(self, mask: bytes) -> bytes:
        """Returns `mask` without the tokens that make a number too long; `mask` itself if no other token is left."""
        if not self._where.search(self._end) or self._matcher.is_error():
            return mask
        both = int.from_bytes(mask, "little") & int.from_bytes(self._matcher.compute_bitmask(), "little")
        return both.to_bytes(len(mask), "little") if both else mask
