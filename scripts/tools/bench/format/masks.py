"""The cost of a mask: on the host, to find it, and on the device, to apply it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from statistics import median
from time import perf_counter
from typing import NamedTuple

import mlx.core as mx

from protocol import decode_format
from runner.grammar import Guide
from runner.grammar.compiler import Compiler
from runner.sampling.mask import Mask, masked
from runner.tokenizer import Tokenizer
from scripts.tools.bench.common.interleave import interleave

Way = Callable[[mx.array, Sequence[Mask]], mx.array]
"""Scores [B, V] and a mask for each row to masked scores."""


class Place(NamedTuple):
    """A point in an answer: its format, its beginning, and the bytes that continue it again and again."""

    wanted: bytes
    begun: bytes
    again: bytes


_THINKING = (
    b'{"type":"sequence","elements":[{"type":"any_text","excludes":["</think>"]},{"type":"optional","content":'
    b'{"type":"sequence","elements":[{"type":"const_string","value":"</think>"},{"type":"json_schema",'
    b'"json_schema":{"type":"object"}}]}}]}'
)
PLACES = {
    "in a string": Place(
        b'{"type":"object","required":["a"],"properties":{"a":{"type":"string"}}}', b'{"a": "', b"abc"
    ),
    "between values": Place(b'{"type":"array","items":{"type":["integer","boolean","null"]}}', b"[1, ", b"1, "),
    "in free text": Place(_THINKING, b"", b"abc "),
}
_STEPS = 40


class Masked(NamedTuple):
    """One vocabulary: microseconds of a token, turn by turn. `host`: by place. `device`: what is added to an argmax, by
    number of rows."""

    vocabulary: int
    host: Mapping[str, Sequence[float]]
    device: Mapping[int, Sequence[float]]


def measure_masks(tokenizer: Tokenizer, turns: int, rows: Sequence[int], seed: int) -> Masked:
    """In turns."""
    vocabulary = tokenizer.vocab_size
    compiler = Compiler(tokenizer, vocabulary)
    hosts = {
        name: partial(_host_us, _guides(compiler, tokenizer, place), place.again) for name, place in PLACES.items()
    }
    host = interleave(hosts, turns)
    string = _guides(compiler, tokenizer, PLACES["in a string"])()
    device: dict[int, list[float]] = {}
    for count in rows:
        mx.random.seed(seed)
        scores = mx.random.normal((count, vocabulary))
        mx.eval(scores)
        masks = [string.mask()] * count
        ways: dict[str, Way] = {"bare": lambda scores, _: scores, "masked": masked}
        found = interleave({name: partial(_device_us, scores, way, masks) for name, way in ways.items()}, turns)
        device[count] = [us - bare for us, bare in zip(found["masked"], found["bare"], strict=True)]
    return Masked(vocabulary, host, device)


def _guides(compiler: Compiler, tokenizer: Tokenizer, place: Place) -> Callable[[], Guide]:
    """Makes guides that stand there."""
    format_ = decode_format(place.wanted)
    assert format_ is not None
    compiled = compiler.compile(format_)

    def make() -> Guide:
        guide = compiled.guide()
        said = b"".join(map(tokenizer.token_bytes, guide.forced(len(place.begun))))
        for byte in place.begun[len(said) :]:
            guide.take(byte)
        return guide

    return make


def _host_us(make: Callable[[], Guide], again: bytes) -> float:
    """The median time of a token: to take it, and to find the next mask."""
    guide = make()
    times = []
    guide.mask()
    for token in islice(cycle(again), _STEPS):
        started = perf_counter()
        guide.take(token)
        guide.mask()
        times.append(1e6 * (perf_counter() - started))
    return median(times)


def _device_us(scores: mx.array, way: Way, masks: Sequence[Mask]) -> float:
    """The median time of an argmax over masked scores, read by the host."""
    times = []
    for _ in range(_STEPS):
        started = perf_counter()
        mx.argmax(way(scores, masks), axis=-1).tolist()
        times.append(1e6 * (perf_counter() - started))
    return median(times)
