"""Regular expressions and grammars written by people: answers match; garbage is refused and breaks nothing."""

import re
import warnings
from random import Random
from time import process_time
from timeit import timeit

import pytest
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from runner.errors import RequestError
from runner.grammar.format_to_lark import with_unique_ways
from tests.unit.grammar.walks import Impatient, accepts, guide_of, spelled, walk, words_tokenizer

SEEDS = st.integers(0, 2**32)


def _wider(inner: SearchStrategy[str]) -> SearchStrategy[str]:
    times = st.sampled_from(["?", "*", "+", "{2}", "{0,3}", "{1,}"])
    return (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.lists(inner, min_size=1, max_size=3).map(lambda ways: f"({'|'.join(ways)})")
        | st.tuples(inner, times).map(lambda parts: f"(?:{parts[0]}){parts[1]}")
    )


REGEXES = st.recursive(
    st.sampled_from(
        ["a", "b", "[a-c]", "[^x]", ".", r"\d", r"\w", r"\s", " ", "é", "[日-本]", r"\.", "/", '"', "\n", r"\n"]
    ),
    _wider,
    max_leaves=8,
)


@settings(max_examples=50)
@given(REGEXES, SEEDS)
def test_every_answer_matches_its_regex_from_end_to_end(pattern: str, seed: int) -> None:
    tokenizer = words_tokenizer()
    random = Random(seed)
    try:
        guide = guide_of({"type": "regex", "pattern": pattern}, tokenizer)
    except RequestError as error:
        assume("llguidance failed" not in str(error))
        raise
    found = walk(guide, tokenizer, random, Impatient(tokenizer, random), most=150)
    for count in found.complete:
        answer = spelled(found.tokens[:count], tokenizer).decode()
        note(repr(answer))
        assert re.fullmatch(pattern, answer)


def grouped(word: str, random: Random) -> str:
    """Returns `word` cut into parts, some of them in groups, some of them written twice."""
    if len(word) < 2 or random.random() < 0.3:
        return word
    at = random.randrange(1, len(word))
    left, right = (grouped(part, random) for part in (word[:at], word[at:]))
    ways = ("{}{}", "({}){}", "{}({})", "(?:{})(?<x>{})", "({0}|{0}){1}", "(?:{0}|{0}){1}", "{0}(?i:{1}|{1})")
    return random.choice(ways).format(left, right).replace("<x>", f"<x{random.randrange(10**9)}>")


@given(st.text("ab", min_size=3, max_size=7), st.sampled_from(["{}", "b?({})", "({}|[b-c])*"]), SEEDS)
def test_alternatives_that_are_equal_but_for_groups_are_one(word: str, around: str, seed: int) -> None:
    """llguidance panics at them."""
    ways = "|".join(grouped(word, Random(seed + at)) for at in range(3))
    assert accepts({"type": "regex", "pattern": around.format(ways)}, word)
    assert accepts({"pattern": f"^(?:{around.format(ways)})$".replace("?<", "?P<")}, f'"{word}"')


@given(st.text(st.sampled_from("ab()[]|?:<>^-i\\"), max_size=12))
def test_a_regex_with_each_alternative_once_means_the_same(text: str) -> None:
    def means(pattern: str) -> object:
        try:
            return [re.fullmatch(pattern, each) is None for each in ("", "a", "b", "ab", "(", "|", "aab")]
        except re.error:
            return None

    with warnings.catch_warnings(action="ignore"):
        assert means(with_unique_ways(text)) == means(text)


def test_the_time_for_a_long_regex_does_not_grow_with_its_square() -> None:
    assert timeit(lambda: with_unique_ways("(a)" * 300_000), timer=process_time, number=1) < 3


@pytest.mark.parametrize(("pattern", "good", "bad"), [(r"\d", "7", "٣"), (r"\w", "z", "é"), (r"\W", "é", "_")])
def test_classes_are_those_of_a_json_schema(pattern: str, good: str, bad: str) -> None:
    regex, schema = {"type": "regex", "pattern": pattern}, {"type": "string", "pattern": f"^{pattern}$"}
    assert [accepts(regex, text) for text in (good, bad)] == [True, False]
    assert [accepts(schema, f'"{text}"') for text in (good, bad)] == [True, False]


def answered_or_refused(wanted: object, seed: int) -> None:
    tokenizer = words_tokenizer()
    random = Random(seed)
    try:
        walk(guide_of(wanted, tokenizer), tokenizer, random, Impatient(tokenizer, random), most=20)
    except RequestError as error:
        note(str(error))


@settings(max_examples=40)
@given(st.text(st.sampled_from("ab()[]{}|*+?\\^$.,-0129:!<>=&~"), max_size=20) | st.text(max_size=10), SEEDS)
def test_an_invalid_regex_is_refused_and_breaks_nothing(pattern: str, seed: int) -> None:
    answered_or_refused({"type": "regex", "pattern": pattern}, seed)


PARTS = (
    *("start", ": ", "\n", "a", "B", '"x"', '"é"', "/[a-z]+/", "/(?s:.*)/", "|", "*", "+", "?", "(", ")", "{2,3}"),
    *("%json {}", '%json {"type": "integer"}', "%ignore", "%llguidance {}", "<think>", "<[97]>", "<[^97]>", "<[*]>"),
    *("[lazy]", '[stop="x"]', '[suffix="x"]', "[max_tokens=2]", "[capture]", "&", "~", "@x", "import", "//", " "),
)


@given(st.lists(st.sampled_from(PARTS), max_size=14).map("".join), st.booleans(), SEEDS)
def test_an_invalid_grammar_is_refused_and_breaks_nothing(grammar: str, begun: bool, seed: int) -> None:
    answered_or_refused({"type": "lark", "grammar": f"start: a\na: {grammar}" if begun else grammar}, seed)
