"""The tokenizer on small copies of common forms: Llama 3, Qwen, Gemma, Llama 2."""

import json
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.tokenizer import Tokenizer, open_tokenizer
from runner.tokenizer.detokenizer import decode_utf8
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level, sentencepiece

Json = dict[str, object]

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = [b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b"ld", b" world", b"\xe3\x81", b"\xc3\xa9"]
PIECES = [" ", "h", "i", "e", "l", "o", "hi", " hi", "  ", "é"]


def load(document: Json, **configs: Json) -> Tokenizer:
    """Opens `document` as tokenizer.json; the keywords are config files by their names without `.json`."""
    files = {f"{name}.json": json.dumps(value).encode() for name, value in configs.items()}
    files["tokenizer.json"] = json.dumps(document).encode()
    return open_tokenizer(files.get)


def added(token_id: int, content: str, **flags: bool) -> Json:
    none = {"special": False, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, **none, **flags}


def with_added(document: Json, *tokens: Json) -> Json:
    return {**document, "added_tokens": list(tokens)}


def llama3() -> Json:
    return byte_level([*ALL_BYTES, *WORDS], ["<|begin_of_text|>", "<|eot_id|>"], split=LLAMA3_SPLIT)


def qwen() -> Json:
    return {**byte_level([*ALL_BYTES, *WORDS], ["<|im_start|>", "<|im_end|>"]), "normalizer": {"type": "NFC"}}


def gemma() -> Json:
    return sentencepiece(PIECES, ["<start_of_turn>"])


def llama2() -> Json:
    return sentencepiece(PIECES, ["<turn>"], prepend_space=True)


FAMILIES = [llama3, qwen, gemma, llama2]


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return decode_utf8(b"".join(map(tokenizer.token_bytes, ids)))


# Encoding


def test_bos_is_prepended_once_more_even_if_the_text_begins_with_it() -> None:
    config: Json = {"add_bos_token": True, "bos_token": "<|begin_of_text|>"}
    tokenizer = load(llama3(), tokenizer_config=config)
    assert tokenizer.add_bos
    assert tokenizer.bos is not None
    assert tokenizer.encode("") == [tokenizer.bos]
    assert tokenizer.encode("<|begin_of_text|>a") == [tokenizer.bos, tokenizer.bos, ord("a")]


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
@pytest.mark.parametrize("special", [False, True])
def test_an_added_token_is_matched_literally_whatever_its_flags(flag: str, special: bool) -> None:
    document = {**qwen(), "normalizer": {"type": "Lowercase"}}
    token = added(267, "<T>", special=special, **{flag: True})
    space = ord(" ")
    tokenizer = load(with_added(document, token))
    assert tokenizer.encode("a <T> a") == [97, space, 267, space, 97]
    assert tokenizer.encode("a<T>a") == [97, 267, 97]
    assert 267 not in tokenizer.encode("<t>")


def test_an_added_token_that_cannot_have_its_id_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load(with_added(llama3(), added(300, "a")))
    assert tokenizer.encode("a") == [97]
    assert caplog.records[0].__dict__["attributes"] == {"file": "tokenizer.json", "count": 1, "token": "a", "id": 300}


@pytest.mark.parametrize("text", ["a\ud800b", "\udc80", "\ud83d\ude00"])
def test_a_lone_surrogate_does_no_harm(text: str) -> None:
    tokenizer = load(llama3())
    clean = text.replace("\ud83d\ude00", "😀").replace("\ud800", "\ufffd").replace("\udc80", "\ufffd")
    assert tokenizer.encode(text) == tokenizer.encode(clean)


# Decoding


DEVSTRAL = {**llama3(), "decoder": gemma()["decoder"]}
DISTILLED = {**DEVSTRAL, "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}}


@pytest.mark.parametrize(
    "tokenizer",
    [load(llama3()), load(gemma()), load(DEVSTRAL), load(DISTILLED)],
    ids=["byte level", "sentencepiece", "Devstral", "a distillation"],
)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0▁"), max_size=20))
def test_the_bytes_of_the_tokens_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert text_of(tokenizer, tokenizer.encode(text)) == text


def test_a_mapped_zero_byte_is_dropped() -> None:
    tokenizer = load(byte_level([b"\0", b"a\0b", b"c"]))
    assert [tokenizer.token_bytes(token_id) for token_id in range(3)] == [b"", b"ab", b"c"]


@pytest.mark.parametrize("text", ["<\uff5cbegin▁of▁sentence\uff5c>", "<é>"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_special_token_stands_for_its_own_text(family: Callable[[], Json], text: str) -> None:
    document = family()
    tokenizer = load(document)
    token_id = tokenizer.vocab_size
    tokens = document["added_tokens"]
    assert isinstance(tokens, list)
    tokenizer = load(with_added(document, *tokens, added(token_id, text, special=True)))
    assert tokenizer.encode(text) == [token_id]
    assert tokenizer.token_bytes(token_id) == text.encode()


def test_ordinary_pieces_listed_as_added_tokens_are_read_as_pieces() -> None:
    document = gemma()
    tokens = document["added_tokens"]
    assert isinstance(tokens, list)
    indent = 4 + 256 + PIECES.index("  ")
    tokenizer = load(with_added(document, *tokens, added(indent, "▁▁")))
    assert tokenizer.token_bytes(indent) == b"  "


@pytest.mark.parametrize("token_id", [-1, 269, 10**6, 2**40])
def test_an_id_outside_the_table_is_nothing(token_id: int) -> None:
    tokenizer = load(llama3())
    assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.token_text(token_id) == ""
