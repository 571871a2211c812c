"""The explanation of a broken schema names the fault and its place. A panic in llguidance fails one request only."""

import json

import pytest

from protocol.format import ConstString, Lark
from runner.errors import RequestError
from runner.grammar.compiler import Compiler
from runner.grammar.explain_error import explain_error, panics_as_errors
from scripts.tools.models.tiny import VOCAB
from tests.lib.tiny_engine import tokenizer
from tests.unit.grammar.walks import bytes_tokenizer, guide_of

BAD = {"type": "strin"}
GOOD = {"type": "string"}
STRICT = {"x-guidance": {"lenient": False}}


def told(wanted: object) -> str:
    with pytest.raises(RequestError) as error:
        guide_of(wanted, bytes_tokenizer())
    assert error.value.status == 400
    assert str(error.value).startswith("Format: ")
    return str(error.value)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (BAD, "$"),
        ({"properties": {"a": GOOD, "b": BAD, "c": GOOD}}, "$.properties.b"),
        ({"anyOf": [GOOD, {"items": BAD}]}, "$.anyOf[1].items"),
        ({"$defs": {"x": {"properties": {"y": BAD}}}, "$ref": "#/$defs/x"}, "$.$defs.x.properties.y"),
        (
            {"type": "object", "properties": {**{f"p{number}": GOOD for number in range(500)}, "z": BAD}},
            "$.properties.z",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else "",
)
def test_the_innermost_part_with_the_fault_is_named(schema: object, place: str) -> None:
    text = told(schema)
    assert "Invalid type: strin" in text
    assert f" at `{place}` of the JSON schema" in text


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({**STRICT, "items": {"not": {"const": 0}}}, 'Unimplemented keys: ["not"] - at `$.items`'),
        ({**STRICT, "type": "string", "format": "iri"}, "Unknown format: iri"),
        ({**STRICT, "oneOf": [{"minimum": 1}, {"maximum": 5}]}, "oneOf constraints are not supported"),
        ({"$ref": "#/$defs/none"}, "'/$defs/none' does not exist"),
        ({"type": "string", "minLength": 5, "maxLength": 4}, "minLength (5) is greater than maxLength (4)"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "incompatible types"),
        ({"type": "string", "pattern": "("}, "unterminated group at character 1 - at `$`"),
        ({**STRICT, "type": "object", "minProperties": 2, "properties": {"a": {}}}, "min/maxProperties only supported"),
        ({"x-guidance": {"nonsense": 1}}, "unknown field `nonsense`"),
        ({"required": "a"}, "required"),
        ({"const": 2**70, "type": "strin"}, "Invalid type: strin - at `$`"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_an_error_says_why_a_schema_is_refused(schema: object, reason: str) -> None:
    assert reason in told(schema)


def test_no_text_is_longer_than_a_person_reads() -> None:
    assert len(told({"type": "x" * 100_000})) < 2000
    assert len(told({"type": "regex", "pattern": "(" * 10_000})) < 2000
    assert len(told({"type": "lark", "grammar": "x" * 100_000})) < 2000


def test_a_schema_too_large_to_compile_is_called_too_large() -> None:
    assert "schema too large" in told(
        {"type": "object", "properties": {f"p{number}": GOOD for number in range(20_000)}}
    )
    assert explain_error("panic: assertion failed: n < 10", ConstString("")).startswith("too large or too complex")


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
