"""Regular expressions in schemas mean what they mean in ECMA-262: compared with the verdicts of a real engine."""

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from runner.errors import RequestError
from runner.grammar.closed_objects import Schema
from runner.grammar.patterns.translator import translated
from tests.unit.grammar.walks import accepts, bytes_tokenizer, compiler_of, format_of


class Row(NamedTuple):
    """A pattern, and the texts that a real engine matches and does not match."""

    pattern: str
    flags: str | None
    matching: list[str]
    others: list[str]


LINES = (Path(__file__).parent / "patterns" / "recorded.jsonl").read_text().splitlines()
ROWS = [Row(*json.loads(line)) for line in LINES]


class Enforced(NamedTuple):
    """The verdict on a pattern, and the texts that are accepted."""

    how: str
    told: str
    accepted: frozenset[str]


def enforced(pattern: str, texts: list[str]) -> Enforced:
    """Returns how a schema with this pattern is enforced, and which of `texts` it accepts."""
    schema = {"type": "string", "pattern": pattern}
    try:
        compiled, beginning = compiler_of(bytes_tokenizer()).compile(format_of(schema))
    except RequestError as error:
        return Enforced("matches nothing" if "Unsatisfiable" in str(error) else "refused", str(error), frozenset())
    matcher, accepted = compiled._matcher, set[str]()
    for text in texts:
        data = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f").encode()
        matcher.reset()
        if matcher.try_consume_tokens([*data]) == len(data) and matcher.is_accepting():
            accepted.add(text)
    told = beginning.left_out
    how = "left out" if told.startswith("the pattern") else "in part" if told else "exact"
    return Enforced(how, told, frozenset(accepted))


def verdict(row: Row) -> str:
    """Returns how a pattern is enforced, and fails if its language is another one."""
    found = enforced(row.pattern, [*row.matching, *row.others])
    lost, more = {*row.matching} - found.accepted, found.accepted - {*row.matching}
    lost = {text for text in lost if not enforced(row.pattern, [text]).accepted}  # a matcher tires of many texts
    if row.flags is None:
        assert f"{json.dumps(row.pattern)} is not a regular expression of ECMA-262" in found.told, found.told
        return "invalid"
    assert found.how != "refused", (row.pattern, found.told)
    assert not any("\0" not in text for text in lost), (row.pattern, lost)  # see the test of NUL below
    assert not more or found.how in ("in part", "left out"), (row.pattern, more)
    return found.how


def test_patterns_mean_what_they_mean_in_an_engine() -> None:
    assert {verdict(row) for row in ROWS[::4]} >= {"exact", "in part", "matches nothing", "invalid"}


@pytest.mark.full
def test_each_pattern_of_the_corpus_is_enforced_or_the_log_says_what_is_not() -> None:
    counts = Counter(map(verdict, ROWS))
    assert counts == {"exact": 559, "in part": 65, "matches nothing": 40, "left out": 3, "invalid": 30}


def test_the_record_has_each_pattern_once_and_texts_on_both_sides() -> None:
    corpus = (Path(__file__).parent / "patterns" / "corpus.txt").read_text().splitlines()
    assert [row.pattern for row in ROWS] == [line for line in corpus if not line.startswith("# ")]
    assert len({row.pattern for row in ROWS}) == len(ROWS) > 500
    valid = [row for row in ROWS if row.flags is not None]
    assert sum(1 for row in valid if row.matching and row.others) > 0.85 * len(valid)


def matched(pattern: str, *texts: str) -> list[str]:
    """Returns those of `texts` that a schema with this pattern, enforced as a whole, accepts."""
    found = enforced(pattern, [*texts])
    assert found.how == "exact", found
    return [text for text in texts if text in found.accepted]


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^(?i:ab)c$", ["ABc", "abc"], ["ABC"]),
        ("(?i)^ab$", ["AB", "ab"], ["b"]),  # Python's
        ("(?is)^(?-i:a).$", ["a\n"], ["A\n"]),
        (r"^(?P<n>\d)(b)$", ["1b"], ["b1"]),
        ("^(?i:[k-l])$", ["K", "l", "\u212a"], ["m"]),
        ("^(?i:É)$", ["é", "É"], ["e"]),
        ("^(?i:[^a])$", ["b"], ["A"]),
        (r"^(?i:\w)$", ["\u017f", "s"], ["é"]),
        (r"^(?i:\W)$", ["é"], ["s", "\u212a"]),
        (r"^(?i:\p{Lu})$", ["a"], ["1"]),
        ("^(?i:a(?-i:b))$", ["Ab"], ["AB"]),
        ("^(?s:.).$", ["\na"], ["a\n"]),
        ("^a(?m:$)\n(?m:^)b$", ["a\nb"], ["ab"]),
        ("(?m:^a$)", ["a", "x\na\u2028y"], ["xa"]),
        (r"^(?:(?<n>a)|(?<n>b))\d$", ["a1", "b1"], ["c1"]),
        (r"^(?<\u{61}b>x)$", ["x"], ["y"]),
    ],
)
def test_syntax_that_the_recorded_engine_does_not_know(pattern: str, good: list[str], bad: list[str]) -> None:
    """The modifiers of 2025, and two groups of one name."""
    assert matched(pattern, *good, *bad) == good


def test_invalid_groups_of_2025_are_refused() -> None:
    for pattern in ("(?i-i:a)", "(?ii:a)", "(?-:a)", "(?x:a)", "(?<n>a)(?<n>b)", "(?<n>(?<n>a))"):
        assert "is not a regular expression of ECMA-262" in enforced(pattern, []).told, pattern


def test_a_class_that_leaves_out_a_quote_leaves_out_nul() -> None:
    """llguidance would let an escaped quote through."""
    for pattern in ('^[^"]$', r"^[^\\]$", r'^(?:[^"]|\0)$', r"^\P{P}$", r"^\p{Cc}$"):
        assert matched(pattern, "\1", "\0") == ["\1"]
    assert matched('^[^"]$', '"', "\\") == ["\\"]
    assert matched(r"^\p{Cc}$", '"', "\\", "\n") == ["\n"]
    assert matched("^[^]$", '"', "\0") == ['"', "\0"]


def test_halves_of_surrogate_pairs_match_as_whole_characters() -> None:
    halves = r"^[\ud83c-\ud83d][\udc00-\udfff]$"
    assert matched(halves, "\U0001f600", "\U0001f3ff", "\U0001f900") == ["\U0001f600", "\U0001f3ff"]
    left_out = r'the pattern "^\\ud83d$", which asks for halves of surrogate pairs - at `$`'
    assert enforced(r"^\ud83d$", []).told.startswith(left_out)


def test_properties_of_a_pattern_without_the_flag_are_properties_and_the_log_says_so() -> None:
    found = enforced(r"^[\p{L}\_]+$", ["é_", "{"])
    assert found.accepted == {"é_"}
    assert found.told.startswith("the older grammar, for which `\\p` is a letter, of the pattern")


def test_a_part_that_is_left_out_is_named_with_its_place() -> None:
    schema = {"properties": {"a": {"enum": [{"pattern": "("}]}, "b": {"items": {"pattern": r"(.)\1", "default": {}}}}}
    beginning = compiler_of(bytes_tokenizer()).compile(format_of(schema))[1]
    assert beginning.left_out == (
        r'references to groups of the pattern "(.)\\1" - at `$.properties.b.items` of the JSON schema'
    )
    faults: list[Schema] = [{"pattern": "a)"}, {"patternProperties": {"a)": {}}}]
    for wrong in faults:
        with pytest.raises(RequestError) as caught:
            compiler_of(bytes_tokenizer()).compile(format_of({"items": wrong}))
        assert str(caught.value) == (
            'Format: the pattern "a)" is not a regular expression of ECMA-262: unmatched `)` at character 2 - '
            "at `$.items` of the JSON schema"
        )
    with pytest.raises(RequestError, match=r"Regex is empty.* at `\$` of the JSON schema"):
        compiler_of(bytes_tokenizer()).compile(format_of({"type": "string", "pattern": "a^b"}))
    with pytest.raises(RequestError, match="Format: cannot enforce references to groups of the pattern"):
        compiler_of(bytes_tokenizer()).compile(format_of({"x-guidance": {"lenient": False}, **schema}))


def test_a_pattern_in_a_message_is_escaped_for_terminals() -> None:
    told = enforced("é(\x9b\x1b", []).told
    assert "é" in told
    assert "\x9b" not in told
    assert "\x1b" not in told


def test_names_of_properties_are_matched_alike() -> None:
    integer = {"type": "integer"}
    closed = {"type": "object", "additionalProperties": False}
    assert accepts({**closed, "patternProperties": {r"\bx$": integer}}, '{"a x": 1}')
    assert not accepts({**closed, "patternProperties": {r"\bx$": integer}}, '{"ax": 1}')
    assert accepts({"type": "object", "propertyNames": {"pattern": r"^\<$"}}, '{"<": 1}')
    assert accepts({"type": "object", "propertyNames": {"minLength": 2}}, '{"a\\n": 1}')
    # A name that a pattern takes only because a part of it is left out gets no schema that is not its own.
    double = {**closed, "patternProperties": {r"^(.)\1$": integer}}
    assert accepts(double, '{"aa": 1}')
    assert not accepts(double, '{"aa": ""}')
    listed = {**double, "properties": {"a": {"type": "string"}}}
    assert accepts(listed, '{"a": ""}')
    assert accepts(listed, '{"b": ""}')
    same = {**closed, "patternProperties": {"a": integer, "(?:a)": {"minimum": 2}}}
    assert "are not disjoint" in compiler_of(bytes_tokenizer()).compile(format_of(same))[1].left_out


def test_a_schema_that_is_referred_to_by_any_path_has_its_patterns_translated() -> None:
    parts: Schema = {"schemas": {"A": {"$ref": "#/components/schemas/B"}, "B": {"items": {"pattern": "^{x}$"}}}}
    schema: Schema = {"$ref": "#/components/schemas/A", "components": parts}
    assert accepts(schema, '["{x}"]')
    assert not accepts(schema, '["x"]')


def test_a_password_of_many_kinds_is_followed_for_many_answers() -> None:
    pattern = r"^(?=.*?[A-Z])(?=.*?[a-z])(?=.*?[0-9])(?=.*?[#?!@$%^&*-]).{8,}$"
    random = Random(3)
    texts = ["".join(random.sample("aZ3#" + "abcXYZ019!?# éàü日本" * 2, 24)) + "aZ3#" for _ in range(60)]
    assert matched(pattern, *texts, "abcdefg#1", "aB#1") == texts


def test_a_word_that_must_not_stand_anywhere_is_ruled_out() -> None:
    words = ["admin", "root", "test", "user"]
    texts = ["adm1n", "roo", "xusexr", *(f"a{word}b" for word in words)]
    assert matched(f"^(?!.*(?:{'|'.join(words)})).*$", *texts) == texts[:3]


def test_a_look_that_is_too_large_leaves_the_rest_of_its_pattern() -> None:
    found = enforced("^(?!.*(?:admin|root|test|user|guest|super))[a-z]{3,20}$", ["abc", "a", "a1b"])
    assert found.accepted == {"abc"}
    assert found.told.startswith("negative look-ahead of the pattern")


def test_a_long_text_may_have_an_edge_at_its_end() -> None:
    assert not translated("a" * 3000 + r"\b").left_out


def test_a_negative_look_that_asks_what_follows_it_rules_out_nothing_more() -> None:
    assert enforced(r"(?<!a\b)b", ["ab"]).accepted == {"ab"}


def test_patterns_beside_others_must_all_match() -> None:
    schema = {"type": "string", "pattern": r"^(?=.*\d).{2,}$", "allOf": [{"pattern": "^a"}, {"maxLength": 3}]}
    assert [text for text in ("a1", "ab1", "b1", "ab", "abc1") if accepts(schema, f'"{text}"')] == ["a1", "ab1"]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(" * 10**4, "is nested too deep"),
        ("(" * 61 + ")" * 61, "is nested too deep"),
        ("a" * (2**16 + 1), "has more than 65,536 characters"),
        ("((a{1000}){1000}){1000}", "needs more than 65,536 characters"),
        ("a{" + "9" * 10**4 + "}", "needs more than 65,536 characters"),
        ("(a)" + "".join(rf"(\{group}\{group})" for group in range(1, 40)), "is too complex"),
        ("^" + "(?:a|(?=b.)c)" * 30, "look-ahead"),
        ("^" + "(?=.*ab)" * 30, "look-ahead"),
        ("^" + r"(?:a|\bb|$)" * 40, r"`\b`, `$`"),
        ("^(?!.*a.{30}b)", "negative look-ahead"),
        ("".join(f"(?=[{chr(at)}-{chr(2 * at)}])." for at in range(256, 999)), "is too complex"),
        (r"a(?=[bé])(?i:é)", "asks for a word boundary without regard to case"),
        (r"(?i:[\P{Lu}])", "negates a property without regard to case"),
    ],
    ids=lambda value: value[:20],
)
def test_a_hostile_pattern_is_left_out(pattern: str, reason: str) -> None:
    found = translated(pattern)
    assert found.left_out == reason
    assert sum(map(len, found.patterns)) <= 2**18
