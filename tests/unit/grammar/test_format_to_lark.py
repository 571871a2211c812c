"""Structural tags: free text up to a closing tag, then JSON; and every other shape of nodes."""

import json

import pytest

from runner.errors import RequestError
from tests.unit.grammar.tags import (
    ANSWER,
    CLOSING,
    JSON,
    Node,
    can_end,
    either,
    free,
    led,
    optional,
    regex,
    sequence,
    text,
    thinking,
)
from tests.unit.grammar.walks import accepts, bits, bytes_tokenizer, guide_of, words_tokenizer

# --- what is an answer


@pytest.mark.parametrize("closings", [(CLOSING,), ("<|x|>", CLOSING, "\n\n")])
def test_free_text_then_a_closing_tag_then_json(closings: tuple[str, ...]) -> None:
    tag = thinking(*closings)
    for closing in closings:
        for thought in ("", 'hm {"a": 1} </', f"{closing[:-1]} 日本"):
            assert accepts(tag, f"{thought}{closing}".encode() + ANSWER)
            assert accepts(tag, thought), "the end of the answer is legal inside the thinking"
            assert not accepts(tag, f"{thought}{closing}"), "but not once the JSON is due"
            assert not accepts(tag, f"{thought}{closing} ".encode() + ANSWER)
            assert not accepts(tag, f"{thought}{closing}".encode() + ANSWER + b" ")
            assert not accepts(tag, f"{thought}{closing}".encode() + ANSWER[:-1])


# --- special tokens


def test_a_constant_may_hold_special_tokens_and_text() -> None:
    tokenizer = words_tokenizer()
    names = {tokenizer.token_text(id_): id_ for id_ in tokenizer.special}
    guide = guide_of(text("a<think>b</think>"), tokenizer)
    assert guide.forced(99) == [ord("a"), names["<think>"], ord("b"), names["</think>"]]
    assert guide.complete


def test_other_special_tokens_may_stand_in_free_text_and_never_in_json() -> None:
    tokenizer = words_tokenizer()
    names = {tokenizer.token_text(id_): id_ for id_ in tokenizer.special - tokenizer.eos}
    assert set(names) == {"<think>", CLOSING, "<|call|>"}
    guide = guide_of(thinking(CLOSING, schema={"type": "string"}), tokenizer)
    assert led(guide, tokenizer, [ord("a"), names["<|call|>"], names["<think>"], ord("b"), names["<|call|>"]])
    assert can_end(guide, tokenizer)
    assert led(guide, tokenizer, [names[CLOSING]])
    assert led(guide, tokenizer, [ord('"'), ord("a")])
    assert not (tokenizer.special & set(bits(guide.mask()))), "inside the string"
    assert led(guide, tokenizer, [ord('"')])
    assert guide.complete


def test_a_special_token_whose_name_holds_what_is_excluded_is_no_free_text() -> None:
    tokenizer = words_tokenizer()
    (call,) = (id_ for id_ in tokenizer.special if tokenizer.token_text(id_) == "<|call|>")
    assert call in bits(guide_of(free("call>x"), tokenizer).mask())
    assert call not in bits(guide_of(free("call"), tokenizer).mask())


# --- other shapes


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (free(), ["", "a", "</think>\n"], []),
        (free("ab"), ["", "a", "b", "aab"[:2]], ["ab", "xaby"]),
        (sequence(), [""], ["a"]),
        (sequence(text("a"), text("b")), ["ab"], ["a", "b", "abb", ""]),
        (sequence(text("a"), sequence(optional(text("b")), text("c"))), ["abc", "ac"], ["ab", "abbc"]),
        (sequence(text("a"), free()), ["a", "abc"], ["", "b"]),
        (sequence(free("b"), optional(text("b"))), ["", "b", "aab", "a"], ["bb"]),
        (sequence(free("b", "c"), either(text("b"), optional(text("c")))), ["", "a", "ab", "ac"], ["abc"]),
        (sequence(free("b"), text(""), text("b"), text("c")), ["abc", "bc"], ["ab", "ac"]),
        (optional(text("a")), ["", "a"], ["aa", "b"]),
        (optional(sequence(free("b"), text("b"))), ["", "b", "ab"], ["a"]),
        (either(text("a"), text("ab"), JSON), ["a", "ab", ANSWER.decode()], ["b", "", "abb"]),
        (either(free("x"), text("x")), ["", "a", "x"], ["xx", "ax"]),
        (text('"\\\n/é'), ['"\\\n/é'], ['"\\n']),
        (regex("[a-c]{2}/?"), ["ab", "cc/"], ["a", "ad", "ab//"]),
        ({"type": "lark", "grammar": 'start: "a" b\nb: "b"+'}, ["ab", "abb"], ["a", "b"]),
        (sequence(JSON, text("!"), JSON), [f"{ANSWER.decode()}!{ANSWER.decode()}"], [ANSWER.decode()]),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_what_each_shape_accepts(wanted: Node, good: list[str], bad: list[str]) -> None:
    assert [each for each in good if not accepts(wanted, each)] == []
    assert [each for each in bad if accepts(wanted, each)] == []


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (either(), ["no element to choose from", "$.elements"]),
        (sequence(text("a"), optional(either())), ["no element to choose from", "$.elements[1].content.elements"]),
        (sequence(free(), text("a")), ["must exclude", "'a'", "$.elements[0]"]),
        (sequence(free("b"), either(text("b"), text("a"))), ["must exclude", "'a'"]),
        (sequence(optional(free("b")), text("b")), ["any_text must end", "$.elements[0].content"]),
        (sequence(either(text("a"), free("b")), text("b")), ["any_text must end", "$.elements[0].elements[1]"]),
        (sequence(free("x"), *[optional(text("x"))] * 65), ["more than 64 ways"]),
        (regex("(?=a)"), ["look-around"]),
        ({"type": "lark", "grammar": "start: nowhere"}, ["nowhere"]),
        ({"type": "json_schema", "json_schema": False}, ["JSON schema must be an object"]),
        (
            sequence(text("a"), {"type": "json_schema", "json_schema": 5}),
            ["JSON schema must be an object", "$.elements[1]"],
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_place(wanted: Node, told: list[str]) -> None:
    with pytest.raises(RequestError) as error:
        guide_of(wanted, bytes_tokenizer())
    assert [each for each in ["Format", *told] if each not in str(error.value)] == []


def test_between_the_tokens_of_json_there_is_one_space_behind_a_comma_or_a_colon() -> None:
    for options in ({}, {"whitespace_flexible": True}, {"whitespace_pattern": " +"}, {"item_separator": " *, *"}):
        schema = {"x-guidance": options, "type": "array", "items": {"type": "object"}}
        assert accepts(schema, '[{"a": 1, "b": 2}, {}]')
        for other in ('[{"a":1, "b": 2}]', '[{"a": 1,"b": 2}]', "[ ]", "[{}, {} ]", "[{},  {}]", " []", "[] ", "[\n]"):
            assert not accepts(schema, other)


def test_the_options_of_a_schema_for_llguidance_stand() -> None:
    either_of = {"oneOf": [{"type": "integer"}, {"minimum": 3}]}
    assert accepts({"x-guidance": {"coerce_one_of": True}, **either_of}, "5")
