"""The time to compile a grammar, and to build the view of the vocabulary before the first one."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from time import perf_counter

from protocol import decode_format
from runner.grammar.compiler import Compiler
from runner.grammar.vocabulary import make_vocabulary
from runner.tokenizer import Tokenizer
from scripts.tools.bench.common.interleave import interleave

Schema = dict[str, object]
_TYPES: Sequence[Schema] = (
    {"type": "string"},
    {"type": "integer", "minimum": 0, "maximum": 9999},
    {"type": "array", "items": {"type": "number"}},
    {"enum": ["red", "green", "blue"]},
    {"type": ["boolean", "null"]},
)


Compiled = Mapping[str, Sequence[float]]
"""Milliseconds by name, turn by turn: of the view of a vocabulary (VIEW), and of schemas compiled behind it."""
VIEW = "view of the vocabulary, once"


def flat(properties: int, *, required: bool = True) -> Schema:
    """An object of so many."""
    by_name = {f"property_{number}": _TYPES[number % len(_TYPES)] for number in range(properties)}
    schema: Schema = {"type": "object", "properties": by_name, "additionalProperties": False}
    return {**schema, "required": list(by_name)} if required else schema


def nested(levels: int) -> Schema:
    """Objects in objects, five properties each."""
    schema = flat(5)
    for _ in range(levels - 1):
        outer = flat(4)
        outer["properties"] = {**outer["properties"], "inner": schema}  # type: ignore[dict-item]  # a dict
        schema = outer
    return schema


SCHEMAS: Mapping[str, Schema] = {
    "any object": {"type": "object"},
    "5 properties": flat(5),
    "50 properties": flat(50),
    "500 properties": flat(500),
    "500, none required": flat(500, required=False),
    "20 levels of 5": nested(20),
}


def measure_compiling(tokenizer: Tokenizer, turns: int) -> Compiled:
    """Each of them anew in every turn."""

    def build_ms() -> float:
        started = perf_counter()
        make_vocabulary(tokenizer, tokenizer.vocab_size)
        return 1e3 * (perf_counter() - started)

    compiler, fresh = Compiler(tokenizer, tokenizer.vocab_size), count()

    def compile_ms(schema: Schema) -> float:
        """One that was asked for before would be known."""
        wanted = decode_format(json.dumps({**schema, "description": str(next(fresh))}).encode())
        assert wanted is not None
        started = perf_counter()
        compiler.compile(wanted)
        return 1e3 * (perf_counter() - started)

    compile_ms({"const": "the first one builds the vocabulary"})
    schemas = {name: partial(compile_ms, schema) for name, schema in SCHEMAS.items()}
    return interleave({VIEW: build_ms, **schemas}, turns)
