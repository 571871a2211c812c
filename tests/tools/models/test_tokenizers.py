"""The tokenizer makers keep their word, read by the library that the runner uses."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from scripts.tools.models.tokenizers import ALL_BYTES, byte_level, sentencepiece, vocabulary_size, write_tokenizer

WORDS = (b"he", b"ll", b"llo", b"hello", b" w", b"or", b" wor", b"\xe2\x82")


def test_every_id_of_a_byte_level_vocabulary_means_its_bytes(tmp_path: Path) -> None:
    made = byte_level([*ALL_BYTES, *WORDS], ["<|a|>", "<|b|>"])
    write_tokenizer(tmp_path, made)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    encoding = tokenizer.encode("hello world<|b|> \u20ac", add_special_tokens=False)
    spelled = [256 + WORDS.index(b"hello"), 256 + WORDS.index(b" wor"), *b"ld", 256 + len(WORDS) + 1]
    assert encoding.ids == [*spelled, *b" ", 256 + WORDS.index(b"\xe2\x82"), 0xAC]
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == "hello world<|b|> \u20ac"
    assert tokenizer.get_vocab_size() == vocabulary_size(made) == 256 + len(WORDS) + 2


@pytest.mark.parametrize("prepend_space", [False, True])
def test_a_sentencepiece_vocabulary_falls_back_to_bytes(prepend_space: bool) -> None:
    made = sentencepiece([*" helowrd", "he", "ll", "llo", "hello", " hello"], ["<|eot|>"], prepend_space=prepend_space)
    tokenizer = Tokenizer.from_str(json.dumps(made))
    encoding = tokenizer.encode("hello world\u20ac<|eot|>", add_special_tokens=False)
    assert encoding.tokens[0] == ("\u2581hello" if prepend_space else "hello")
    assert encoding.tokens[-4:] == ["<0xE2>", "<0x82>", "<0xAC>", "<|eot|>"]
    assert encoding.ids[-4] == 4 + 0xE2
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == "hello world\u20ac<|eot|>"
    assert tokenizer.get_vocab_size() == vocabulary_size(made)
