"""Answers over HTTP: with a grammar that forces nothing against none at all, and with one that forces a lot, whether it
jumps ahead or not."""

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple

from scripts.tools.bench.common.interleave import interleave
from scripts.tools.bench.common.requests import MismeasuredError
from scripts.tools.bench.common.servers import Server, this_runner
from scripts.tools.bench.format.models import write_speaker
from scripts.tools.bench.llamas import Size
from scripts.tools.host.lib import Client, G, Process, Request

FREE, JUMPS, NO_JUMPS = "no format", "jumping ahead", "token by token"
PROMPT = "the name of it: "
_LENGTH = 1 << 16
GRAMMARS: Mapping[str, object] = {
    FREE: None,
    "JSON string": {"type": "string", "minLength": _LENGTH},
    "free text": {
        "type": "sequence",
        "elements": [
            {"type": "any_text", "excludes": ["</think>"]},
            {
                "type": "optional",
                "content": {
                    "type": "sequence",
                    "elements": [
                        {"type": "const_string", "value": "</think>"},
                        {"type": "json_schema", "json_schema": {"type": "object"}},
                    ],
                },
            },
        ],
    },
    "regex": {"type": "regex", "pattern": f"[ -~]{{{_LENGTH}}}"},
}
"""Of which none forces anything, nor lets the answer end."""
RECORD: Mapping[str, object] = {
    "type": "object",
    "properties": {
        f"{name}_of_the_record": {"enum": [f"{name} is known and was looked up", f"{name} could not be found anywhere"]}
        if number % 2
        else {"type": "integer", "minimum": 1000, "maximum": 9999}
        for number, name in enumerate(("name", "year", "place", "author", "publisher", "language", "number", "shelf"))
    },
    "required": [
        f"{name}_of_the_record"
        for name in ("name", "year", "place", "author", "publisher", "language", "number", "shelf")
    ],
    "additionalProperties": False,
}
"""Of which most is forced."""


class Answered(NamedTuple):
    """Tokens of an answer, those per second of its decode steps, and those per second from the request to its end."""

    tokens: int
    decode_per_s: float
    whole_per_s: float


class Answers(NamedTuple):
    """One vocabulary, turn by turn, by grammar and by whether it jumps."""

    grammars: Mapping[str, Sequence[Answered]]
    jumps: Mapping[str, Sequence[Answered]]


def measure_answers(vocabulary: int, size: Size, arguments: argparse.Namespace) -> Answers:
    """In turns. ValueError if a server does not start."""
    turns = arguments.turns
    ours = this_runner("ours", 1, blas=arguments.blas, blas_threads=arguments.blas_threads)
    drawn = ours._replace(command=(sys.executable, "-m", "scripts.tools.bench.format.without_jumps"))
    with asyncio.Runner() as loop, ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="bench-")))
        write_speaker(directory, vocabulary, arguments.seed, size)

        def asking(server: Server, wanted: object, tokens: int) -> Callable[[], Answered]:
            return partial(
                _ask, loop, processes[server.command], Request(PROMPT, {"num_predict": tokens}, format=wanted)
            )

        processes = {server.command: server.start(directory, stack) for server in (ours, drawn)}
        grammars = {name: asking(ours, wanted, arguments.tokens) for name, wanted in GRAMMARS.items()}
        found = interleave(grammars, turns)
        for name, each in found.items():
            if any(one.tokens != arguments.tokens for one in each):
                raise MismeasuredError(f"{name}: an answer ended early")
        jumps = interleave({JUMPS: asking(ours, RECORD, 1 << 12), NO_JUMPS: asking(drawn, RECORD, 1 << 12)}, turns)
    return Answers(found, jumps)


def _ask(loop: asyncio.Runner, process: Process, request: Request) -> Answered:
    return loop.run(_answered(process, request))


async def _answered(process: Process, request: Request) -> Answered:
    started = perf_counter()
    async with Client(process.port, G, process.output) as client, client.stream(request) as answers:
        async for answer in answers:
            if answer.done:
                whole_s = perf_counter() - started
                count = answer.eval_count
                return Answered(count, 1e9 * count / max(1, answer.eval_duration), count / whole_s)
    raise MismeasuredError("an answer broke off")
