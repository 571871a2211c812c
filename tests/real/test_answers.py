"""A real model answers as mlx-lm does, whatever the cache, the batch or the format is."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.tools.host.lib import Client, G, Process, Request
from scripts.tools.real.main import make_model
from tests.process.conftest import running
from tests.real.record import ANSWERS, QUESTIONS, TOKENS, chat
from tests.unit.grammar.judge import fault

GREEDY = {"temperature": 0, "num_predict": TOKENS}
RECORDED = json.loads(ANSWERS.read_text())
TURNS = 20
pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def model() -> Path:
    return make_model()


@pytest.fixture(scope="module")
def runner(model: Path) -> Iterator[Process]:
    """One runner with all defaults, but for the number of requests at once."""
    with running(str(model), None, "--parallel", "8", generation=G) as process:
        yield process


async def answer(client: Client, prompt: str, **more: object) -> str:
    return (await client.complete(Request(prompt, GREEDY | more))).text


@pytest.mark.parametrize("question", QUESTIONS)
async def test_a_greedy_answer_is_that_of_mlx_lm(question: str, runner: Process) -> None:
    async with Client.of(runner) as client:
        assert await answer(client, chat(question)) == RECORDED[question]


async def test_packed_weights_give_the_same_answer(model: Path) -> None:
    with running(str(model), None, "--dtype", "float32", generation=G) as process:
        async with Client.of(process) as client:
            assert await answer(client, chat(QUESTIONS[0])) == RECORDED[QUESTIONS[0]]


async def test_eight_users_at_once_get_what_each_gets_alone(runner: Process) -> None:
    async with Client.of(runner) as client:
        answers = await asyncio.gather(*(answer(client, chat(question)) for question in QUESTIONS))
    assert answers == [RECORDED[question] for question in QUESTIONS]


async def test_a_long_conversation_equals_one_without_a_cache(model: Path, runner: Process) -> None:
    turns: list[str] = []
    with running(str(model), None, "--cache", "none", generation=G) as process:
        async with Client.of(process) as plain, Client.of(runner) as client:
            for number in range(TURNS):
                turns.append(f"{QUESTIONS[number % len(QUESTIONS)]} ({number})")
                final = await client.complete(Request(chat(*turns), GREEDY | {"num_predict": 12}))
                assert final.text == await answer(plain, chat(*turns), num_predict=12)
                if number:
                    assert final.final.prompt_eval_cached_count
                turns.append(final.text)


ENDLESS = {
    "How many atoms are there in the universe? JSON.": {"properties": {"n": {"type": "integer"}}, "required": ["n"]},
    "Write pi with all its digits as JSON.": {"properties": {"pi": {"type": "number"}}, "required": ["pi"]},
}
"""Questions to which the model greedily writes one number, up to the end of its context."""


@pytest.mark.parametrize("cache", ["trie", "single"])
async def test_numbers_end(cache: str, model: Path) -> None:
    with running(str(model), None, "--cache", cache, generation=G) as process:
        async with Client.of(process) as client:
            for question, wanted in ENDLESS.items():
                for seed in range(3):
                    options = {"temperature": min(seed, 1), "seed": seed, "num_predict": 80}
                    done = await client.complete(Request(chat(question), options, format=wanted))
                    assert fault(wanted, done.text) == ""


TYPES: tuple[dict[str, object], ...] = (
    {"type": "string", "maxLength": 12},
    {"type": "integer", "minimum": 0, "maximum": 99},
    {"type": "boolean"},
    {"enum": ["red", "green", "blue"]},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
)
NAMES = ("name", "age", "member", "colour", "scores")


def schema(number: int) -> dict[str, object]:
    """Returns one of 50: from one to four fields, in turning order, nested once in every fifth."""
    fields = {NAMES[(number + place) % 5]: TYPES[(number + place) % 5] for place in range(1 + number % 4)}
    found: dict[str, object] = {"type": "object", "properties": fields, "required": list(fields)}
    found["additionalProperties"] = False
    if number % 5 == 4:
        found = {"type": "object", "properties": {"person": found, "id": TYPES[1]}, "required": ["person", "id"]}
    return found


async def test_answers_in_fifty_formats_follow_their_schemas(runner: Process) -> None:
    async with Client.of(runner) as client:

        async def check(number: int) -> None:
            wanted = schema(number)
            prompt = chat(f"Describe person number {number} as JSON.")
            done = await client.complete(Request(prompt, {"temperature": 0.7, "seed": number}, format=wanted))
            assert not fault(wanted, done.text), done.text

        await asyncio.gather(*map(check, range(50)))
