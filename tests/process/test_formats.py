"""Structured output of the running process, as hosts and as people request it.

See docs/internals/wire.md, 8.4 and 11.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from protocol import DoneReason
from scripts.tools.host.lib import Client, Process, Request
from scripts.tools.host.lib.generations import G
from scripts.tools.models.scripted import BYTES, Transition, write_scripted
from scripts.tools.models.store import write_store
from tests.process.conftest import RANDOM, REQUEST_S, running

THINKER = "thinker:latest"
HOST = replace(G, request_timeout_s=REQUEST_S)
COUNT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
THOUGHT = "<think>let me see"
CLOSING = ("</think>", "<|done|>")
_SPECIAL = ("<|end|>", "<think>", "<|done|>")


def structural_tag(schema: object, closing: tuple[str, ...] = ()) -> dict[str, object]:
    """Returns the format that a host sends for `schema`, with the tags that end a model's thinking."""
    json_schema = {"type": "json_schema", "json_schema": schema}
    if not closing:
        return {"type": "structural_tag", "format": json_schema}
    tags = [{"type": "const_string", "value": tag} for tag in closing]
    end = tags[0] if len(tags) == 1 else {"type": "or", "elements": tags}
    tail = {"type": "optional", "content": {"type": "sequence", "elements": [end, json_schema]}}
    free = {"type": "any_text", "excludes": list(closing)}
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": [free, tail]}}


def write_thinker(directory: Path) -> Path:
    """After `1` comes the closing tag, then nothing but digits; `4` leads to a closing tag of five tokens, and
    everything else to `.` and so on without end."""
    vocabulary = (*BYTES, b"</think>", b"</th")
    special = {len(vocabulary) + number: text for number, text in enumerate(_SPECIAL)}
    rows: dict[int, Transition] = {ord("1"): 256, ord("4"): 257, 257: ord("i")}
    rows |= {ord(before): ord(after) for before, after in (("i", "n"), ("n", "k"), ("k", ">"))}
    default = {ord(character): -float(place) for place, character in enumerate(".}7")}
    return write_scripted(directory, vocabulary, rows, [min(special)], special, default=default)


@pytest.fixture(scope="module")
def thinking(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    write_store(models_dir, THINKER, write_thinker(tmp_path_factory.mktemp("formats") / "thinker"))
    with running(THINKER, models_dir, generation=HOST) as process:
        yield process


@pytest.fixture
async def thinker(thinking: Process) -> AsyncIterator[Client]:
    async with Client.of(thinking) as client:
        yield client


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ("json", "{}"),
        ({"type": "array", "items": {"const": 7}, "minItems": 2, "maxItems": 2}, "[7, 7]"),
        ({"type": "lark", "grammar": 'start: "<" start ">" | "."'}, "."),
        (
            {
                "type": "sequence",
                "elements": [{"type": "const_string", "value": "a"}, {"type": "regex", "pattern": "b"}],
            },
            "ab",
        ),
    ],
)
async def test_a_format_may_be_sent_in_the_forms_that_people_write(thinker: Client, wanted: object, text: str) -> None:
    answer = await thinker.complete(Request("x", {"num_predict": 50}, format=wanted))
    assert answer.final.done_reason == DoneReason.STOP
    assert answer.text == text


@pytest.mark.parametrize("number", [1, 4])
async def test_the_schema_begins_behind_the_closing_tag(thinker: Client, number: int) -> None:
    request = Request(f"{THOUGHT}{number}", {"num_predict": 40}, format=structural_tag(COUNT, CLOSING))
    answer = await thinker.complete(request)
    thought, _, content = answer.text.partition(CLOSING[0])
    assert thought == ""
    assert [*json.loads(content)] == ["n"]
    assert answer.final.done_reason == DoneReason.STOP


@pytest.mark.full
async def test_grammars_that_nobody_uses_do_not_fill_a_small_budget(models_dir: Path) -> None:
    """Each takes 3 MB while it is used: five fill the budget."""
    with running(RANDOM, models_dir, "--memory", "16M", generation=HOST) as process:
        async with Client.of(process) as client:
            wanted = [structural_tag({"enum": [f"{number}{number}"]}) for number in range(8)]
            requests = [Request("x", {"num_predict": 9}, format=each) for each in (*wanted, None, None)]
            answers = await asyncio.gather(*map(client.complete, requests))
            answers += [await client.complete(request) for request in requests]
    assert [answer.text for answer in answers[:8]] == [f'"{number}{number}"' for number in range(8)]
