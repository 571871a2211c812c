"""Numbers are bounded. So an answer ends if its schema bounds texts, arrays, open objects and recursion, even if the
model goes on for as long as it may."""

import json
import math
from random import Random

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from runner.grammar.messages import Follow, State
from runner.grammar.number_bounds import ANY_END
from runner.tokenizer import Tokenizer
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level
from tests.unit.grammar.judge import fault
from tests.unit.grammar.tags import free, sequence, text
from tests.unit.grammar.walks import (
    END,
    accepts,
    bits,
    bytes_tokenizer,
    compiler_of,
    format_of,
    guide_of,
    opened,
    spelled,
    walk,
    words_tokenizer,
)

Schema = dict[str, object]
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
ANY: Schema = {"type": "json_schema", "json_schema": {"type": "object"}}
CENTS: Schema = {**NUMBER, "multipleOf": 0.01}
MOST_DIGITS, MOST_FRACTION, MOST_EXPONENT = 19, 20, 3
LONGEST_NUMBER = len("-") + MOST_DIGITS + len(".") + MOST_FRACTION + len("e+") + MOST_EXPONENT
LONGEST_CHARACTER = len(r"\u0000")
SEEDS = st.integers(0, 2**32)
DIGITS = frozenset(b"0123456789")


class Longwinded:
    """A model that takes a digit wherever one may come, then whatever goes on, and ends only where it must."""

    def __init__(self, tokenizer: Tokenizer, random: Random) -> None:
        self._tokenizer = tokenizer
        self._random = random

    def __call__(self, possible: list[int], tokens: list[int]) -> int:
        ranks = [self._rank(token) for token in possible]
        return self._random.choice([token for token, rank in zip(possible, ranks, strict=True) if rank == min(ranks)])

    def _rank(self, token: int) -> int:
        """Prefers digits, then what else makes a number longer, then texts, items, and at last ends."""
        text = self._tokenizer.token_bytes(token)
        kinds = (DIGITS.issuperset(text), text[:1] in b".eE+-", text[:1] not in b'"]},:', text[:1] == b",")
        return len(kinds) + 1 if token in self._tokenizer.eos else (*kinds, True).index(True)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (INTEGER, f"{2**63 - 1}", f"{2**63}"),
        (INTEGER, f"{-(2**63)}", f"{-(2**63) - 1}"),
        (INTEGER, "1" * 19, "1" * 20),
        (NUMBER, f"0.{'3' * 20}", f"0.{'3' * 21}"),
        (NUMBER, repr(0.1 + 0.2), f"0.{'0' * 20}1"),
        (NUMBER, "9e279", "9e280"),
        (NUMBER, "1.5e+007", "1.5e+0007"),
        (NUMBER, "5e-324", "5e-0324"),
        (CENTS, "19.99", "1" * 20),
        ({"type": "object"}, '{"a": [1.5]}', f'{{"a": [{"1" * 20}]}}'),
        ({**INTEGER, "format": "int32"}, f"{-(2**31)}", f"{2**31}"),
        ({**INTEGER, "format": "int64"}, f"{-(2**63)}", f"{2**63}"),
        ({**INTEGER, "format": "uint8", "maximum": 256}, "255", "256"),
        ({**INTEGER, "format": "uint16", "minimum": 9}, "65535", "8"),
        ({**INTEGER, "format": "uint64"}, f"{92 * 10**17}", "-1"),
        ({**INTEGER, "format": "double-int"}, f"{2**53 - 1}", f"{2**53}"),
        ({"type": ["integer", "null"], "format": "int32"}, "null", f"{2**31}"),
        ({**NUMBER, "maximum": 1.7976931348623157e308}, "-1.5e200", "1e99999"),
    ],
)
def test_a_number_has_the_digits_that_its_type_needs(schema: Schema, good: str, bad: str) -> None:
    assert accepts(schema, good)
    assert not accepts(schema, bad)


@pytest.mark.parametrize(
    ("schema", "good"),
    [
        ({"enum": [1e30, 1e31]}, f"1{'0' * 31}"),
        ({**INTEGER, "minimum": 1e30}, f"5{'0' * 30}"),
        ({**NUMBER, "minimum": 1e30}, "5e30"),
        ({**NUMBER, "exclusiveMinimum": 0, "maximum": 1e-25}, f"0.{'0' * 25}1"),
        ({**INTEGER, "format": "int32", "minimum": 5e9}, "5000000000"),
        ({**CENTS, "enum": [5e18]}, f"5{'0' * 18}"),
        ({"anyOf": [{**NUMBER, "multipleOf": 10, "exclusiveMinimum": 9e17}, {"type": "null"}]}, f"1{'0' * 18}"),
        ({**INTEGER, "multipleOf": 100_000}, f"{'1' * 19}00000"),
        ({"type": "string"}, f'"{"3" * 99}"'),
        (sequence(text("["), ANY, text("]")), '[{"a": {}}]'),
        (sequence(text("pi 3."), free("|"), text("|"), ANY), f"pi 3.{'1' * 99}|{{}}"),
        ({"type": "regex", "pattern": "[0-9]*"}, "1" * 99),
    ],
)
def test_what_needs_more_digits_may_have_them(schema: Schema, good: str) -> None:
    assert accepts(schema, good)


def test_a_number_above_a_bound_does_not_end_in_zeros() -> None:
    def least(possible: list[int], tokens: list[int]) -> int:
        return min(DIGITS.intersection(possible), default=possible[0])

    guide = guide_of({**NUMBER, "exclusiveMinimum": 0}, bytes_tokenizer())
    assert bytes(walk(guide, bytes_tokenizer(), Random(0), least).tokens) == b"0.00000000000000000001"


@pytest.mark.parametrize("schema", [INTEGER, CENTS, {**NUMBER, "exclusiveMinimum": 0}, {}], ids=str)
def test_a_number_is_bounded_alike_step_by_step_ahead_and_again(schema: Schema) -> None:
    tokenizer, random = bytes_tokenizer(), Random(0)
    wanted: Schema = {"properties": {"n": schema}, "required": ["n"]}
    tokens = walk(guide_of(wanted, tokenizer), tokenizer, random, Longwinded(tokenizer, random), most=99).tokens
    assert len('{"n": ') + MOST_DIGITS <= len(tokens) < 99
    guide, masks = guide_of(wanted, tokenizer), list[bytes]()
    for token in tokens:
        guide.take(token)
        masks.append(guide.mask())
    guide.restart([])
    ahead = [each if isinstance(each, bytes) else guide.bit(each) for each in guide.look_ahead(tokens, 0)]
    assert ahead == masks[: len(ahead)]
    assert len(ahead) >= len(tokens) - 1
    for count in range(1, len(tokens)):
        guide.restart(tokens[:count])
        assert guide.mask() == masks[count - 1]


class Counted:
    """A matcher that knows how often it was asked for a mask."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.asked = 0

    def __getattr__(self, name: str) -> object:
        self.asked += name == "compute_bitmask"
        return getattr(self._matcher, name)


def test_bounds_are_asked_behind_digits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher, state = compiler_of(bytes_tokenizer()).compile(format_of({"type": "array"}))
    assert matcher._bounds is not None
    counted = Counted(matcher._bounds._matcher)
    monkeypatch.setattr(matcher._bounds, "_matcher", counted)
    for byte in b'["a text e", {"-": [true, -1.5e+2, null]}]':
        forced = state.forced[1:]
        state = State(forced) if state.forced else matcher.follow(Follow([byte]))
    assert counted.asked == len(("1", "1.", "1.5", "1.5e", "1.5e+", "1.5e+2"))


@pytest.mark.parametrize("token", [b"1" * 20, b"1e280", b"1.5E+999", b"0." + b"3" * 22])
def test_a_token_that_is_a_long_number_by_itself_does_not_come(token: bytes) -> None:
    tokenizer = opened(byte_level([*ALL_BYTES, token], [END]), generation_config={"eos_token_id": 257})
    assert 256 not in bits(guide_of(NUMBER, tokenizer).mask())
    assert 256 in bits(guide_of({"type": "regex", "pattern": "[0-9.eE+]*"}, tokenizer).mask())


@st.composite
def ending(draw: st.DrawFn, depth: int = 2, *, more: tuple[str, ...] = ("reference",)) -> Schema:
    """Generates schemas that bound texts, arrays and objects, and refer to one of them, X."""
    number = st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6).map(lambda value: round(value, 3))
    inner = ending(depth - 1, more=more)
    kinds = ("array", "object", "either", *more) if depth else ()
    match draw(st.sampled_from(("number", "number", "integer", "format", "values", "text", *kinds))):
        case "number" | "integer" as kind:
            schema: Schema = {"type": kind}
            if draw(st.booleans()):
                schema[draw(st.sampled_from(("minimum", "exclusiveMinimum")))] = least = draw(number)
                if draw(st.booleans()):
                    schema[draw(st.sampled_from(("maximum", "exclusiveMaximum")))] = least + 10**5
            if draw(st.booleans()):
                schema["multipleOf"] = draw(st.sampled_from((1, 7, 100, 3600, 0.01, 0.25)))
            return schema
        case "format":
            return {**INTEGER, "format": draw(st.sampled_from(("int32", "int64", "uint8", "uint64")))}
        case "values":
            return {"enum": draw(st.lists(number | st.booleans() | st.none() | st.text(max_size=3), min_size=1))}
        case "text":
            return {"type": "string", "maxLength": draw(st.integers(0, 5))}
        case "array":
            return {"type": "array", "items": draw(inner), "maxItems": draw(st.integers(0, 3))}
        case "object":
            names = draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True))
            some: list[Schema] = [{}, {"required": names[:1]}, {"anyOf": [{"required": [name]} for name in names]}]
            properties = {name: draw(inner) for name in names}
            return {"type": "object", "properties": properties, **draw(st.sampled_from(some))}
        case "either":
            return {"anyOf": draw(st.lists(inner, min_size=1, max_size=3))}
    return {"$ref": "#/$defs/X"}


def longest(schema: Schema, x: Schema) -> int:
    """Returns the most bytes of an answer."""
    match schema:
        case {"$ref": _}:
            return longest(x, x)
        case {"enum": list(values)}:
            return max(len(json.dumps(value)) for value in values)
        case {"properties": dict(properties)}:
            return len("{}") + sum(len(f'"{name}": , ') + longest(each, x) for name, each in properties.items())
        case {"anyOf": list(ways)}:
            return max(longest(way, x) for way in ways)
        case {"items": dict(items), "maxItems": int(most)}:
            return len("[]") + most * (longest(items, x) + len(", "))
        case {"maxLength": int(most)}:
            return len('""') + most * LONGEST_CHARACTER
        case {"type": "integer"}:
            return len("-") + MOST_DIGITS
    return LONGEST_NUMBER


def check(inner: Schema, x: Schema, seed: int) -> None:
    random, schema = Random(seed), {**inner, "$defs": {"X": x}}
    for tokenizer, jumps in ((words_tokenizer(), True), (bytes_tokenizer(), False)):
        guide, model, most = guide_of(schema, tokenizer), Longwinded(tokenizer, random), longest(inner, x) + 1
        found = walk(guide, tokenizer, random, model, jumps=jumps, most=most)
        answer = spelled(found.tokens, tokenizer)
        note(str(answer))
        assert len(answer) < most
        assert not fault(schema, answer)
        assert all(math.isfinite(number) for number in _numbers(json.loads(answer)))


def _numbers(value: object) -> list[float]:
    if isinstance(value, list | dict):
        return [found for each in (value.values() if isinstance(value, dict) else value) for found in _numbers(each)]
    return [value] if isinstance(value, int | float) else []


@settings(max_examples=10, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(ending(), ending(1, more=()), SEEDS)
def test_every_answer_ends_within_the_documented_bound(schema: Schema, x: Schema, seed: int) -> None:
    check(schema, x, seed)


@settings(max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(ending(), ending(1, more=()), SEEDS)
def test_where_bounds_are_not_asked_they_allow_all_that_the_grammar_does(schema: Schema, x: Schema, seed: int) -> None:
    tokenizer, random = words_tokenizer(), Random(seed)
    model, tokens = Longwinded(tokenizer, random), list[int]()
    compiled, state = compiler_of(tokenizer).compile(format_of({**schema, "$defs": {"X": x}}))
    everywhere = compiled.copy()
    assert everywhere._bounds is not None
    everywhere._bounds._where = ANY_END
    while not state.complete and (possible := {*bits(state.mask)} - tokenizer.eos):
        choose = model if random.random() < 0.5 else lambda among, _: random.choice(among)
        tokens.append(choose(sorted(possible), tokens))
        state = compiled.follow(Follow(tokens[-1:]))
        assert state == everywhere.follow(Follow(tokens[-1:]))


@pytest.mark.full
@settings(max_examples=200, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(ending(3), ending(2, more=()), SEEDS)
def test_so_does_every_answer_of_many_and_larger_schemas(schema: Schema, x: Schema, seed: int) -> None:
    check(schema, x, seed)
