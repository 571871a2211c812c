"""A panic inside the tokenizers library is an error of the one text or token that it met."""

import json

import pytest

from runner.errors import PanicError, panics_as
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
    strip = {"type": "Strip", "content": "a", "start": 2, "stop": 2}
    of_tokens = tokenizer(
        model={"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, decoder=strip, pre_tokenizer=None
    )
    assert of_tokens.token_text(1) == "b"
    with pytest.raises(PanicError, match=r"slice index|out of bounds"):
        of_tokens.token_text(0)
    capfd.readouterr()  # the library tells of its panics itself


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError])
def test_what_is_no_panic_stays_what_it_is(error: type[BaseException]) -> None:
    with pytest.raises(error), panics_as(PanicError):
        raise error
    with pytest.raises(PanicError, match="why"), panics_as(PanicError):
        raise PanicException("why")
