"""A panic inside the tokenizers library is an error of the one text or token that it met."""

import json

import pytest

from runner.errors import ModelError, PanicError, panics_as
from runner.tokenizer import Tokenizer, open_tokenizer
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level

PanicException = type("PanicException", (BaseException,), {})
"""pyo3's name for it, in a module that cannot be imported."""


def tokenizer(**parts: object) -> Tokenizer:
    data = json.dumps({**byte_level(ALL_BYTES), **parts}).encode()
    return open_tokenizer({"tokenizer.json": data}.get)


def test_a_real_one_in_a_text_or_a_token_is_an_exception(capfd: pytest.CaptureFixture[str]) -> None:
    of_texts = tokenizer(pre_tokenizer={"type": "FixedLength", "length": 0})
    with pytest.raises(PanicError, match=r"tokenizer\.json: chunk size must be non-zero"):
        of_texts.encode("text")
    of_tokens = tokenizer(decoder={"type": "Strip", "content": "a", "start": 2, "stop": 2})
    assert of_tokens.token_text(ord("b")) == "b"
    with pytest.raises(PanicError, match=r"slice index|out of bounds"):
        of_tokens.token_text(ord("a"))
    capfd.readouterr()  # the library tells of its panics itself


def test_a_real_one_over_a_file_names_the_file(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match=r"parse tokenizer: tokenizer\.json: Precompiled"):
        tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    capfd.readouterr()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError])
def test_what_is_no_panic_stays_what_it_is(error: type[BaseException]) -> None:
    with pytest.raises(error), panics_as(PanicError):
        raise error
    with pytest.raises(PanicError, match="why"), panics_as(PanicError):
        raise PanicException("why")
