"""For random schemas, every answer ends, is JSON and matches its schema; so does every prefix at which it could end."""

from random import Random

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from runner.tokenizer import Tokenizer
from tests.unit.grammar.judge import fault
from tests.unit.grammar.schemas import Schema, schemas
from tests.unit.grammar.tags import led
from tests.unit.grammar.walks import Impatient, bytes_tokenizer, guide_of, spelled, walk, words_tokenizer

SEEDS = st.integers(0, 2**32)
LENIENT = [HealthCheck.too_slow, HealthCheck.data_too_large]


def check(schema: Schema, tokenizer: Tokenizer, random: Random, *, jumps: bool) -> None:
    found = walk(guide_of(schema, tokenizer), tokenizer, random, Impatient(tokenizer, random), jumps=jumps)
    for count in found.complete:
        answer = spelled(found.tokens[:count], tokenizer)
        note(str(answer))
        assert not fault(schema, answer)


@pytest.mark.full
@settings(max_examples=200, derandomize=True, suppress_health_check=LENIENT)
@given(schemas(), SEEDS)
def test_every_answer_is_as_its_schema_wants_it(schema: Schema, seed: int) -> None:
    random = Random(seed)
    check(schema, words_tokenizer(), random, jumps=True)
    check(schema, words_tokenizer(), random, jumps=False)


@pytest.mark.full
@settings(max_examples=50, derandomize=True, suppress_health_check=LENIENT)
@given(schemas(depth=1), SEEDS)
def test_so_is_every_answer_spelled_in_bytes(schema: Schema, seed: int) -> None:
    check(schema, bytes_tokenizer(), Random(seed), jumps=True)


@pytest.mark.parametrize(
    ("answer", "fits"),
    [('{"xa": null}', True), ('{"xa": 2}', False), (r'{"x\u0061": 2}', True), (r'{"\"xa": 2}', True)],
)
def test_an_escaped_name_is_an_additional_property(answer: str, fits: bool) -> None:
    schema = {"type": "object", "patternProperties": {"^x": {"const": None}}}
    assert led(guide_of(schema, bytes_tokenizer()), bytes_tokenizer(), list(answer.encode())) is fits
    assert (not fault(schema, answer)) is fits


@pytest.mark.slow
@settings(max_examples=10_000, suppress_health_check=LENIENT)
@given(schemas(depth=3), SEEDS, st.booleans())
def test_so_is_every_answer_of_many_and_larger_schemas(schema: Schema, seed: int, jumps: bool) -> None:
    check(schema, words_tokenizer(), Random(seed), jumps=jumps)
