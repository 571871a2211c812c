"""llguidance's view of a tokenizer: bytes, special tokens, end tokens, and encoding in the middle of an answer."""

from functools import cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from runner.grammar.vocabulary import make_vocabulary
from runner.tokenizer import Tokenizer
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level, sentencepiece, trained_model, written_model
from tests.unit.grammar.judge import fault
from tests.unit.grammar.walks import END, Impatient, bits, guide_of, opened, spelled, walk, words_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"hello world": {"type": "string"}, "the quick": {"const": "über  brown"}, "n": {"type": "integer"}},
    "required": ["hello world", "the quick"],
    "additionalProperties": False,
}
PIECES = (*"abcdefghijklmnopqrstuvwxyz ", "he", "ll", "hello", " wo", "rl", " hello", '{"', '": "', "  ", "日本")
TOKENIZERS = {
    "byte-level": lambda: words_tokenizer(),
    "sentencepiece": lambda: opened(sentencepiece(PIECES, ["<x>"]), generation_config={"eos_token_id": 1}),
    "sentencepiece, space before": lambda: opened(
        sentencepiece(PIECES, ["<x>"], prepend_space=True), generation_config={"eos_token_id": 1}
    ),
    "trained": lambda: opened(trained_model()),
    "trained, no space before": lambda: opened(trained_model(dummy_prefix=False)),
    "trained, unigram": lambda: opened(trained_model("unigram")),
    "trained, normalizing": lambda: opened(trained_model(normalization="nmt_nfkc", remove_extra_whitespaces=True)),
    "trained, without bytes": lambda: opened(trained_model("unigram", byte_fallback=False)),
    "trained, own symbols": lambda: opened(trained_model(user_defined=("{", '"')), added_tokens={"<extra>": 395}),
    "only some bytes": lambda: opened(
        byte_level([b"a", b"b", b"ab", "é".encode()], [END]), generation_config={"eos_token_id": 4}
    ),
    "pieces": lambda: opened(
        written_model([("<unk>", "unknown"), ("a", "normal"), ("▁", "normal"), ("<s>", "control")])
    ),
    "BOS in front": lambda: opened(
        byte_level(ALL_BYTES, ["<s>", END]),
        tokenizer_config={"bos_token": "<s>", "add_bos_token": True},
        generation_config={"eos_token_id": 257},
    ),
}
"""Functions that make tokenizers, by name."""
ABLE = [name for name in TOKENIZERS if name not in ("trained, without bytes", "only some bytes", "pieces")]
"""Names of tokenizers that can spell any text."""


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return TOKENIZERS[name]()


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=20)
@given(data=st.text().map(str.encode) | st.binary() | st.sampled_from([END, "<x>", "<s>", "</s>"]).map(str.encode))
def test_any_bytes_are_cut_into_tokens_that_spell_them(name: str, data: bytes) -> None:
    """An exception from the tokenizer would be a panic in Rust."""
    tokenizer = tokenizer_of(name)
    tokens = vocabulary_of(name).tokenize_bytes(data)
    assert tokenizer.special.isdisjoint(tokens)
    assert tokenizer.eos.isdisjoint(tokens)
    if name in ABLE and b"\0" not in data:  # which a byte-level token never means, as Ollama has it
        assert spelled(tokens, tokenizer) == data


@cache
def vocabulary_of(name: str) -> "LLTokenizer":
    tokenizer = tokenizer_of(name)
    return make_vocabulary(tokenizer, tokenizer.vocab_size)


@pytest.mark.parametrize("name", ABLE)
def test_answers_are_json_in_every_vocabulary(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for seed in range(3):
        random = Random(seed)
        found = walk(guide_of(SCHEMA, tokenizer), tokenizer, random, Impatient(tokenizer, random), jumps=seed % 2 == 0)
        assert not fault(SCHEMA, spelled(found.tokens, tokenizer))


@pytest.mark.parametrize("name", [name for name in ABLE if name != "trained, normalizing"])
def test_what_is_forced_is_cut_as_the_tokenizer_cuts_it_in_the_middle_of_a_text(name: str) -> None:
    tokenizer = tokenizer_of(name)
    forced = guide_of({"type": "const_string", "value": "\nthe quick brown fox, hello world"}, tokenizer).forced(99)
    before = tokenizer.encode("x")
    assert [*before, *forced] == tokenizer.encode("x\nthe quick brown fox, hello world")


def test_every_token_that_ends_an_answer_is_legal_where_it_may_end() -> None:
    tokenizer = opened(byte_level(ALL_BYTES, ["<e>", "<f>", "<g>"]), generation_config={"eos_token_id": [258, 256]})
    guide = guide_of({"type": "integer"}, tokenizer)
    assert not tokenizer.eos & set(bits(guide.mask()))
    guide.take(ord("1"))
    assert {256, 257, 258} & set(bits(guide.mask())) == {256, 258} == tokenizer.eos


def test_without_a_token_that_ends_an_answer_it_ends_where_its_grammar_does() -> None:
    tokenizer = opened(byte_level(ALL_BYTES))
    guide = guide_of({"type": "integer", "minimum": 10, "maximum": 99}, tokenizer)
    for token in b"42":
        assert not guide.complete
        assert {id_ for id_ in bits(guide.mask()) if id_ < 256} <= set(b"0123456789")
        guide.take(token)
    assert guide.complete


@pytest.mark.parametrize("size", [300, 256])
def test_a_model_with_fewer_tokens_than_its_tokenizer_is_offered_only_its_own(size: int) -> None:
    tokenizer = words_tokenizer()
    guide = guide_of({"type": "string", "minLength": 1}, tokenizer, vocab_size=size)
    for token in b'"a':
        assert max(bits(guide.mask())) <= size
        guide.take(token)
    assert {id_ for id_ in bits(guide.mask()) if id_ < size}
