"""A failure inside llguidance fails only its own request."""

import pytest

from protocol.format import Lark
from runner.errors import RequestError
from runner.grammar.compiler import Compiler
from runner.grammar.explain_error import panics_as_errors
from scripts.tools.models.tiny import VOCAB
from tests.lib.tiny_engine import tokenizer

PanicException = type("PanicException", (BaseException,), {})
"""pyo3's name for it, in a module that cannot be imported."""


def test_a_real_one_is_called_like_that() -> None:
    """llguidance's tree of tokens cannot hold a text of so many bytes."""
    from llguidance import LLTokenizer, TokenizerWrapper

    class Vast:
        eos_token_id, bos_token_id, special_token_ids = 0, None, (0,)
        tokens = (b"<end>", b"a" * 5000)

        def __call__(self, text: bytes) -> list[int]:
            return [1] * len(text)

    with pytest.raises(RequestError, match="assertion failed"), panics_as_errors():
        LLTokenizer(TokenizerWrapper(Vast()), n_vocab=2)


def test_a_panic_while_compiling_fails_only_its_own_format(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: object) -> None:
        raise PanicException("out of fuel")

    compiler = Compiler(tokenizer(), VOCAB)
    with monkeypatch.context() as patch:
        patch.setattr("runner.grammar.compiler.make_vocabulary", panic)
        with pytest.raises(RequestError, match="out of fuel"):
            compiler.compile(Lark('start: "0"'))
    assert compiler.compile(Lark('start: "0"'))[1].forced == [ord("0") - 1]
