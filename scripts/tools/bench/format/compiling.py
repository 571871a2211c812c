"""The time to compile a grammar, and to build the view of the vocabulary before the first one."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple

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


class Compiled(NamedTuple):
    """Milliseconds with one vocabulary, turn by turn: to build its view, and to compile a schema behind that."""

    vocabulary: int
    build_ms: Sequence[float]
    compile_ms: Mapping[str, Sequence[float]]


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

    compiler = Compiler(tokenizer, tokenizer.vocab_size)
    _compile_ms(compiler, {"const": "the first one builds the vocabulary"}, turn=0)
    contenders: dict[str, Callable[[], float]] = {"": build_ms}
    for name, schema in SCHEMAS.items():
        contenders[name] = partial(_Anew(compiler, schema).compile_ms)
    found = interleave(contenders, turns)
    return Compiled(tokenizer.vocab_size, found.pop(""), found)


class _Anew:
    """Compiles a schema again and again: one that was asked for before is known."""

    def __init__(self, compiler: Compiler, schema: Schema) -> None:
        self._compiler = compiler
        self._schema = schema
        self._turn = 0

    def compile_ms(self) -> float:
        self._turn += 1
        return _compile_ms(self._compiler, self._schema, self._turn)


def _compile_ms(compiler: Compiler, schema: Schema, turn: int) -> float:
    wanted = decode_format(json.dumps({**schema, "description": str(turn)}).encode())
    assert wanted is not None
    started = perf_counter()
    compiler.compile(wanted)
    return 1e3 * (perf_counter() - started)
