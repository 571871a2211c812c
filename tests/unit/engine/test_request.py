"""Refusal of prompts that cannot fit, before they are tokenized to the end."""

import json

import pytest

from runner.engine.request import check_length_in_parts, most_prompt_bytes, refuse_size
from runner.errors import RequestError
from runner.tokenizer import PART_CHARACTERS, Tokenizer, open_tokenizer
from scripts.tools.models.tokenizers import byte_level

CONTEXT = 300_000


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Returns a tokenizer with one token for each byte."""
    return open_tokenizer({"tokenizer.json": json.dumps(byte_level()).encode(), "config.json": b"{}"}.get)


def test_a_prompt_that_is_probably_too_long_is_counted_until_it_is(tokenizer: Tokenizer) -> None:
    parts = check_length_in_parts("x" * (CONTEXT * 8 + 1), tokenizer, CONTEXT)
    assert next(parts, "the end") is None
    with pytest.raises(RequestError, match=rf"\({2 * PART_CHARACTERS} tokens\) exceeds .* \({CONTEXT} tokens\)"):
        next(parts)


@pytest.mark.parametrize("size", [0, PART_CHARACTERS, PART_CHARACTERS * 8])
def test_a_prompt_whose_length_may_fit_is_not_counted(size: int, tokenizer: Tokenizer) -> None:
    assert next(check_length_in_parts("x" * size, tokenizer, size // 8), "the end") == "the end"


def test_no_prompt_of_more_bytes_fits(tokenizer: Tokenizer) -> None:
    assert most_prompt_bytes(tokenizer, 1000) == 64_000
    for size, count in ((64_001, 1000), (128_000, 2000)):
        with pytest.raises(RequestError, match=rf"input length \({count} tokens\) exceeds"):
            refuse_size(size, tokenizer, 1000)
