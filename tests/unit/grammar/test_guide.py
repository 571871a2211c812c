"""A guide follows one answer: tokens that must come, tokens that may, and no others."""

import re
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.errors import RequestError
from runner.grammar import matcher
from runner.grammar.guide import Guide
from runner.grammar.messages import Follow, State
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level
from tests.unit.grammar.test_features import FEATURES, Schema
from tests.unit.grammar.walks import (
    WORDS,
    Impatient,
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

FORCED = b'{"name": "abc'
SCHEMA: Schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^abc[0-9]?$"}},
    "required": ["name"],
    "additionalProperties": False,
}


SCHEMAS = st.sampled_from([feature.schema for feature in FEATURES.values()])


def state(guide: Guide) -> object:
    return guide.complete, None if guide.complete else guide.mask()


def test_what_is_forced_comes_first_and_then_there_is_a_choice() -> None:
    tokenizer = words_tokenizer()
    guide = guide_of(SCHEMA, tokenizer)
    forced = guide.forced(99)
    assert spelled(forced, tokenizer) == FORCED
    assert len(forced) < len(FORCED), "in tokens as the tokenizer makes them"
    assert guide.forced(99) == []
    digits = [b"%d" % digit for digit in range(10)]
    assert {tokenizer.token_bytes(token) for token in bits(guide.mask())} == {b'"', b'"}', *digits}


def test_no_more_is_forced_than_there_is_room_for() -> None:
    tokenizer = words_tokenizer()
    whole = guide_of(SCHEMA, tokenizer).forced(99)
    guide = guide_of(SCHEMA, tokenizer)
    assert guide.forced(0) == []
    assert guide.forced(1) == whole[:1]
    assert guide.forced(2) == whole[1:3]
    assert guide.forced(99) == whole[3:]


@pytest.mark.parametrize("wrong", [ord("x"), ord("{"), 300, 10**6])
def test_a_token_that_may_not_come_is_refused(wrong: int) -> None:
    tokenizer = words_tokenizer()
    for skipped in (0, 99):
        guide = guide_of(SCHEMA, tokenizer)
        guide.forced(skipped)
        guide.take(wrong)
        assert not guide.complete
        assert guide.forced(99) == []
        with pytest.raises(RequestError):
            guide.mask()


@pytest.mark.parametrize("text", [b"[]", b"[1, 2]"])
def test_it_is_complete_once_nothing_may_follow(text: bytes) -> None:
    guide = guide_of({"type": "array", "items": {"type": "integer"}}, bytes_tokenizer())
    for byte in text:
        assert not guide.complete
        guide.take(byte)
    assert guide.complete


def test_what_is_forced_at_the_end_has_to_come_before_it_is_complete() -> None:
    guide = guide_of({"const": "a"}, bytes_tokenizer())
    assert not guide.complete
    assert guide.forced(2) == [*b'"a']
    assert not guide.complete
    assert guide.forced(2) == [*b'"']
    assert guide.complete


@settings(max_examples=20)
@given(SCHEMAS, st.integers(0, 2**32), st.booleans())
def test_led_again_along_the_same_tokens_it_stands_where_it_stood(schema: Schema, seed: int, jumps: bool) -> None:
    tokenizer = words_tokenizer()
    random = Random(seed)
    tokens = walk(guide_of(schema, tokenizer), tokenizer, random, Impatient(tokenizer, random, 15), jumps=jumps).tokens
    led, restarted = guide_of(schema, tokenizer), guide_of(schema, tokenizer)
    for count, token in enumerate(tokens):
        restarted.restart(tokens[:count])
        assert state(led) == state(restarted)
        led.take(token)
    restarted.restart(tokens)
    assert state(led) == state(restarted)


@settings(max_examples=20)
@given(SCHEMAS, st.integers(0, 2**32), st.integers(0, 5))
def test_looking_ahead_finds_what_the_answer_would_find_there(schema: Schema, seed: int, pending: int) -> None:
    tokenizer, random = words_tokenizer(), Random(seed)
    tokens = walk(guide_of(schema, tokenizer), tokenizer, random, Impatient(tokenizer, random, 15), jumps=False).tokens
    stays, led = guide_of(schema, tokenizer), guide_of(schema, tokenizer)
    at = len(stays.forced(pending))
    led.take(*tokens[:at])
    with patch.object(matcher, "_TRY_S", 60.0):
        while at < len(tokens) and at < 24:
            before = state(stays)
            ahead = stays.look_ahead([*tokens[at : at + 6], 10**6], 60.0)
            assert state(stays) == before
            further = guide_of(schema, tokenizer)
            further.take(*tokens[:at])
            for place, mask in enumerate(ahead):
                further.take(tokens[at + place])
                assert not further.complete
                assert (mask if isinstance(mask, bytes) else further.bit(mask)) == further.mask()
            whole = min(6, len(tokens) - at)
            if len(ahead) < whole:  # the first token behind which nothing can come
                further.take(tokens[at + len(ahead)])
                assert further.complete
                assert at + len(ahead) + 1 == len(tokens)
            led.take(tokens[at])
            stays.take(tokens[at])
            assert state(stays) == state(led)
            at += 1


def test_nothing_is_looked_ahead_after_a_token_that_is_not_allowed() -> None:
    tokenizer = words_tokenizer()
    forced = guide_of(SCHEMA, tokenizer).forced(99)
    assert guide_of(SCHEMA, tokenizer).look_ahead([300], 60.0) == []
    assert guide_of(SCHEMA, tokenizer).look_ahead([*forced[:2], 300], 60.0) == forced[1:3]
    guide = guide_of(SCHEMA, tokenizer)
    guide.forced(99)
    assert guide.look_ahead([ord("x"), ord('"')], 60.0) == []
    assert not guide.fault


class Scripted:
    """A source that answers with these states; None stands for one that is late."""

    def __init__(self, *states: State | None) -> None:
        self.states = [*states]
        self.steps: list[Follow] = []

    def send(self, step: Follow) -> None:
        self.steps.append(step)

    def receive(self, patience_s: float) -> State | None:
        return self.states.pop(0) if self.states else None

    def close(self) -> None: ...


def test_looking_ahead_costs_the_answer_no_time_of_its_own() -> None:
    source = Scripted(State(tried=[5], seconds=1e6), State(mask=b"\2"))
    guide = Guide(source, State(mask=b"\1"), 8)
    assert guide.look_ahead([0], 1.0) == [5]
    guide.take(0)
    assert guide.wait(1.0)
    assert (guide.mask(), guide.fault) == (b"\2", "")


def test_what_is_seen_too_late_is_not_used() -> None:
    source = Scripted(None, None)
    guide = Guide(source, State(mask=b"\1"), 8)
    assert guide.look_ahead([0, 1], 0.0) == []
    assert guide.look_ahead([0, 1], 0.0) == [], "one at a time"
    assert len(source.steps) == 1
    guide.take(0)
    source.states = [State(tried=[5]), State(mask=b"\2")]
    assert guide.wait(1.0)
    assert guide.mask() == b"\2"
    assert [step.tokens for step in source.steps] == [[0, 1], [0]]


def test_each_token_of_a_run_has_its_own_time() -> None:
    """Such a grammar is slow, but no slower than one token at a time may be."""
    for tokens, fault in ((8, False), (1, True)):
        guide = Guide(Scripted(*[State(mask=b"\1", seconds=0.3)] * 30), State(mask=b"\1"), 8)
        for _ in range(30):
            guide.take(*[0] * tokens)
            assert guide.wait(1.0)
        assert bool(guide.fault) == fault


POOR = opened(byte_level([b"a", b"b"], ["<e>"]), generation_config={"eos_token_id": 2})


def test_what_the_vocabulary_cannot_spell_is_told_in_words_where_the_answer_would_stand_still() -> None:
    guide = guide_of({"type": "const_string", "value": "abc"}, POOR)
    assert guide.forced(9) == [0, 1]
    assert not guide.complete
    with pytest.raises(RequestError, match="no tokens of the model spell"):
        guide.mask()


def test_a_grammar_that_it_cannot_even_begin_is_refused_before_there_is_a_guide() -> None:
    with pytest.raises(RequestError, match="no tokens of the model spell"):
        compiler_of(POOR).compile(format_of({"type": "object"}))


BLANK = {token for token, text in enumerate([*ALL_BYTES, *WORDS]) if text.isspace()}
STRING = re.compile(rb'"(?:\\.|[^"\\])*("|$)')


@settings(max_examples=20)
@given(SCHEMAS, st.integers(0, 2**32))
def test_a_model_that_would_rather_write_spaces_finds_one_behind_each_comma_and_colon(
    schema: Schema, seed: int
) -> None:
    tokenizer = words_tokenizer()
    random = Random(seed)
    impatient = Impatient(tokenizer, random)

    def choose(possible: list[int], tokens: list[int]) -> int:
        in_string = any(not match[1] for match in STRING.finditer(spelled(tokens, tokenizer)))
        blank = [] if in_string else sorted(BLANK.intersection(possible))
        return random.choice(blank) if blank else impatient(possible, tokens)

    said = spelled(walk(guide_of(schema, tokenizer), tokenizer, random, choose).tokens, tokenizer)
    assert re.fullmatch(rb"(?:[,:] |[^\s,:])*", STRING.sub(b'""', said))
