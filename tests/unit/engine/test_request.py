"""The context of a request, and the refusal of prompts that cannot fit in it, before they are tokenized to the end."""

import json

import pytest

from runner.engine.request import Limits
from runner.errors import RequestError
from runner.server.prepare import check_length_in_parts, most_prompt_bytes, refuse_size
from runner.tokenizer import PART_CHARACTERS, Tokenizer, open_tokenizer
from scripts.tools.models.tokenizers import byte_level

CONTEXT = 300_000


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Returns a tokenizer with one token for each byte."""
    return open_tokenizer({"tokenizer.json": json.dumps(byte_level()).encode(), "config.json": b"{}"}.get)


def test_a_prompt_that_is_probably_too_long_is_counted_until_it_is(tokenizer: Tokenizer) -> None:
    parts = check_length_in_parts("x" * (CONTEXT * 8 + 1), tokenizer, Limits(CONTEXT, 0))
    assert next(parts, "the end") is None
    with pytest.raises(RequestError, match=rf"\({2 * PART_CHARACTERS} tokens\) exceeds .* \({CONTEXT} tokens\)"):
        next(parts)


@pytest.mark.parametrize("size", [0, PART_CHARACTERS, PART_CHARACTERS * 8])
def test_a_prompt_whose_length_may_fit_is_not_counted(size: int, tokenizer: Tokenizer) -> None:
    assert next(check_length_in_parts("x" * size, tokenizer, Limits(size // 8, 0)), "the end") == "the end"


def test_no_prompt_of_more_bytes_fits(tokenizer: Tokenizer) -> None:
    assert most_prompt_bytes(tokenizer, 1000) == 64_000
    for size, count in ((64_001, 1000), (128_000, 2000)):
        with pytest.raises(RequestError, match=rf"input length \({count} tokens\) exceeds"):
            refuse_size(size, tokenizer, Limits(1000, 0))


@pytest.mark.parametrize(
    ("gpu_gib", "num_ctx", "context"),
    [
        (0, 0, 100_000),
        (0, -1, 100_000),
        (0, 8192, 8192),
        (0, 1, 1),
        (0, 99_999, 99_999),
        (0, 100_000, 100_000),
        (0, 262_144, 100_000),
        (0, 4096, 100_000),  # what a host sends by itself on a machine without a GPU
        (22, 4096, 100_000),
        (22, 32_768, 32_768),
        (23, 32_768, 100_000),
        (23, 4096, 4096),
        (46, 32_768, 100_000),
        (47, 32_768, 32_768),
    ],
)
def test_the_context_is_what_somebody_chose_below_the_models_own(gpu_gib: int, num_ctx: int, context: int) -> None:
    limits = Limits(100_000, 7).on_gpus(gpu_gib << 30).within(num_ctx)
    assert limits.context_length == context
    assert limits.vocab_size == 7
    limits.refuse_beyond(context - 1)
    what = "context length that num_ctx sets" if context < 100_000 else "model's maximum context length"
    with pytest.raises(RequestError) as refused:
        limits.refuse_beyond(context)
    assert str(refused.value) == f"input length ({context} tokens) exceeds the {what} ({context} tokens)"
