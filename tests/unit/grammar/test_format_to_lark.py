"""Structural tags: free text up to a closing tag, in any tokenization, then JSON; and every other shape of nodes."""

import json
from functools import cache

import pytest

from runner.errors import RequestError
from runner.tokenizer import Tokenizer
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level
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
from tests.unit.grammar.walks import accepts, bits, bytes_tokenizer, guide_of, opened, spelled, words_tokenizer


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


@cache
def pieces_tokenizer(*, special: bool = False) -> Tokenizer:
    """Returns tokens: bytes, all parts of the closing tag and tokens across its end; or the tag as a special token."""
    tag = CLOSING.encode()
    parts = {tag[start:end] for start in range(len(tag)) for end in range(start + 2, len(tag) + 1)}
    parts |= {b'think>{"', b'>{"a', b">x", b"a</", b"x</think>", b'</think>{"a": ', b"</thinking"}
    vocabulary = [*ALL_BYTES, *sorted(parts - ({tag} if special else set()))]
    named = [CLOSING] if special else []
    return opened(
        byte_level(vocabulary, [*named, "<|end|>"]), generation_config={"eos_token_id": len(vocabulary) + len(named)}
    )


@pytest.mark.parametrize("special", [False, True])
def test_free_text_has_no_part_of_a_character_left_at_its_end(special: bool) -> None:
    tokenizer = pieces_tokenizer(special=special)
    guide = guide_of(thinking(CLOSING), tokenizer)
    first, second = "é".encode()
    assert led(guide, tokenizer, [first])
    assert not can_end(guide, tokenizer)
    assert ord("<") not in bits(guide.mask())
    assert led(guide, tokenizer, [second])
    assert can_end(guide, tokenizer)


def spellings(tag: bytes) -> list[list[bytes]]:
    """Returns every way to split it into parts."""
    ends = range(1, len(tag) + 1)
    return [[tag[:end], *rest] for end in ends for rest in spellings(tag[end:])] if tag else [[]]


def ids_of(tokenizer: Tokenizer) -> dict[bytes, int]:
    special = tokenizer.special
    return {tokenizer.token_bytes(id_): id_ for id_ in range(tokenizer.vocab_size) if id_ not in special}


def test_a_closing_tag_is_seen_however_it_is_cut_into_tokens() -> None:
    tokenizer = pieces_tokenizer()
    ids = ids_of(tokenizer)
    ways = spellings(CLOSING.encode())
    assert len(ways) == 2 ** (len(CLOSING) - 1)
    for way in ways:
        guide = guide_of(thinking(CLOSING), tokenizer)
        assert led(guide, tokenizer, [ord("a"), *(ids[part] for part in way)])
        assert not can_end(guide, tokenizer)
        assert spelled(guide.forced(99), tokenizer) == b'{"a": '


@pytest.mark.parametrize(
    ("tokens", "legal"),
    [
        ([b"x</think>"], True),
        ([b"</", b'think>{"'], True),
        ([b'</think>{"a": '], True),
        ([b"</think", b">x"], False),
        ([b"</thinking"], True),
    ],
)
def test_a_token_may_hold_the_end_of_the_closing_tag_and_what_follows_it(tokens: list[bytes], legal: bool) -> None:
    tokenizer = pieces_tokenizer()
    ids = ids_of(tokenizer)
    guide = guide_of(thinking(CLOSING), tokenizer)
    assert led(guide, tokenizer, [ord("h"), *(ids[token] for token in tokens[:-1])])
    assert (ids[tokens[-1]] in bits(guide.mask())) is legal


def test_a_closing_tag_that_is_a_special_token_is_that_token_and_no_text() -> None:
    tokenizer = pieces_tokenizer(special=True)
    ids = ids_of(tokenizer)
    (tag,) = tokenizer.special - tokenizer.eos
    guide = guide_of(thinking(CLOSING), tokenizer)
    assert led(guide, tokenizer, [ids[b"</think"]])
    assert ids[b">x"] not in bits(guide.mask())
    assert ord(">") not in bits(guide.mask())
    assert led(guide, tokenizer, [ord("!"), tag])
    assert spelled(guide.forced(99), tokenizer) == b'{"a": '
    assert not can_end(guide, tokenizer)


def test_a_closing_tag_that_is_added_but_not_special_is_text() -> None:
    document = byte_level(ALL_BYTES, [CLOSING, "<|end|>"])
    added = document["added_tokens"]
    assert isinstance(added, list)
    added[0]["special"] = False
    tokenizer = opened(document, generation_config={"eos_token_id": 257})
    for spelling in ([256], [*CLOSING.encode()]):
        guide = guide_of(thinking(CLOSING), tokenizer)
        assert led(guide, tokenizer, [ord("a"), *spelling])
        assert spelled(guide.forced(99), tokenizer) == b'{"a": '
