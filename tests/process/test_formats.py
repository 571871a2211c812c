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
from scripts.tools.host.lib import Client, Process, Request, StatusError, spawn
from scripts.tools.host.lib.generations import G
from scripts.tools.models.scripted import BYTES, Transition, write_scripted
from scripts.tools.models.store import write_store
from tests.process.conftest import RANDOM, REQUEST_S, RUNNER

THINKER, SPACES = "thinker:latest", "spaces:latest"
HOST = replace(G, request_timeout_s=REQUEST_S)
COUNT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "minItems": 1, "maxItems": 3},
        "height": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 3}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "height"],
    "additionalProperties": False,
}
THOUGHT = "<think>let me see"
CLOSING = ("</think>", "</thought>", "<|done|>")
_SPECIAL = ("<|end|>", "<think>", "<|done|>", "<|other|>")


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


def _scores(characters: str) -> dict[int, float]:
    """Returns scores that prefer the first allowed byte of these."""
    return {ord(character): -float(place) for place, character in enumerate(characters)}


def write_thinker(directory: Path) -> Path:
    """After `1`, `2`, `3` comes the closing tag of that place, then nothing but digits; `0` is followed by the end,
    `s` by `ee`, and everything else by `.` and so on without end."""
    vocabulary = (*BYTES, b"</think>", b"</thought>", b"</th")
    special = {len(vocabulary) + number: text for number, text in enumerate(_SPECIAL)}
    end, _, done, other = special
    rows: dict[int, Transition] = {ord("1"): 256, ord("2"): 257, ord("3"): done, ord("0"): end, ord("4"): 258}
    rows |= {258: ord("i"), ord("i"): ord("n"), ord("n"): ord("k"), ord("k"): ord(">"), ord("5"): other}
    return write_scripted(directory, vocabulary, rows, [end], special, default=_scores(".}7"))


def write_spaces(directory: Path) -> Path:
    """Writes a model that prefers endless spaces and line breaks."""
    return write_scripted(
        directory,
        BYTES,
        {},
        [256],
        {256: "<|end|>"},
        default=_scores(" \n\t}7"),
    )


@pytest.fixture(scope="module")
def store(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("formats")
    write_store(models_dir, THINKER, write_thinker(directory / "thinker"))
    write_store(models_dir, SPACES, write_spaces(directory / "spaces"))
    return models_dir


def running(store: Path, model: str) -> Iterator[Process]:
    with spawn(RUNNER, model, models_dir=store, generation=HOST) as process:
        process.wait_ready(60)
        yield process


@pytest.fixture(scope="module")
def thinking(store: Path) -> Iterator[Process]:
    yield from running(store, THINKER)


@pytest.fixture(scope="module")
def random(store: Path) -> Iterator[Process]:
    yield from running(store, RANDOM)


@pytest.fixture
async def thinker(thinking: Process) -> AsyncIterator[Client]:
    async with Client.of(thinking) as client:
        yield client


@pytest.fixture
async def anything(random: Process) -> AsyncIterator[Client]:
    """Yields a client of the model with random weights."""
    async with Client.of(random) as client:
        yield client


async def test_an_answer_follows_its_schema(anything: Client) -> None:
    drawn = [{"temperature": 1.5, "seed": seed, "num_predict": 400} for seed in range(1, 9)]
    requests = [Request("A person:", options, format=structural_tag(PERSON)) for options in drawn]
    answers = await asyncio.gather(*map(anything.complete, requests))
    for answer in answers:
        person = json.loads(answer.text)
        assert [*person] == ["name", "age", "tags", "height"]
        assert 0 <= person["age"] <= 150
        assert 1 <= len(person["tags"]) <= 3
        assert answer.final.done_reason == DoneReason.STOP
    assert len({answer.text for answer in answers}) > 4, "they are drawn, not made up"
    again = [await anything.complete(request) for request in requests]
    assert [answer.text for answer in again] == [answer.text for answer in answers], "alone as in company"


async def test_constrained_and_free_requests_run_together(anything: Client) -> None:
    free = [Request(f"free {number}", {"num_predict": 60, "temperature": 1, "seed": 3}) for number in range(2)]
    bound = [
        Request(f"bound {number}", {"num_predict": 200, "temperature": 1, "seed": 4}, format=structural_tag(PERSON))
        for number in range(2)
    ]
    alone = [await anything.complete(request) for request in (*free, *bound)]
    together = await asyncio.gather(*map(anything.complete, (*free, *bound)))
    assert [answer.text for answer in together] == [answer.text for answer in alone]


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ("json", "{}"),
        ({"type": "array", "items": {"const": 7}, "minItems": 2, "maxItems": 2}, "[7, 7]"),
        ({"type": "regex", "pattern": "(no|yes){2}!"}, None),
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
async def test_a_format_may_be_sent_in_the_forms_that_people_write(
    thinker: Client, wanted: object, text: str | None
) -> None:
    answer = await thinker.complete(Request("x", {"num_predict": 50}, format=wanted))
    assert answer.final.done_reason == DoneReason.STOP
    if text is not None:
        assert answer.text == text
    else:
        assert answer.text.endswith("!")
        assert len(answer.text) in (5, 6, 7)


@pytest.mark.parametrize("wanted", ["json", COUNT, {"type": "array", "minItems": 3, "maxItems": 3, "items": COUNT}])
async def test_a_model_that_prefers_endless_spaces_still_ends(store: Path, wanted: object) -> None:
    with spawn(RUNNER, SPACES, models_dir=store, generation=HOST) as process:
        process.wait_ready(60)
        async with Client.of(process) as client:
            answer = await client.complete(
                Request("x", {"num_predict": 400, "repeat_last_n": 64, "presence_penalty": 3.0}, format=wanted)
            )
    json.loads(answer.text)
    assert answer.final.done_reason == DoneReason.STOP


async def test_a_limit_that_cuts_an_answer_short_is_reported(thinker: Client) -> None:
    answer = await thinker.complete(Request("x", {"num_predict": 3}, format=structural_tag(COUNT)))
    assert answer.text == '{"n'
    assert (answer.final.done_reason, answer.final.eval_count) == (DoneReason.LENGTH, 3)


async def test_grammars_that_nobody_uses_do_not_fill_a_small_budget(store: Path) -> None:
    """Each takes 3 MB while it is used: five fill the budget."""
    with spawn(RUNNER, RANDOM, models_dir=store, generation=HOST, arguments=("--memory", "16M")) as process:
        process.wait_ready(60)
        async with Client.of(process) as client:
            wanted = [structural_tag({"enum": [f"{number}{number}"]}) for number in range(8)]
            requests = [Request("x", {"num_predict": 9}, format=each) for each in (*wanted, None, None)]
            answers = await asyncio.gather(*map(client.complete, requests))
            answers += [await client.complete(request) for request in requests]
    assert [answer.text for answer in answers[:8]] == [f'"{number}{number}"' for number in range(8)]


# --- thinking


@pytest.mark.parametrize("tags", [CLOSING[:1], CLOSING[:2], CLOSING])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
async def test_the_schema_begins_behind_the_closing_tag(thinker: Client, tags: tuple[str, ...], number: int) -> None:
    """`4` leads to a closing tag of five tokens, the others to tags of one. Any other tag is part of the thinking."""
    tag = {1: CLOSING[0], 2: CLOSING[1], 3: CLOSING[2], 4: CLOSING[0]}[number]
    answer = await thinker.complete(
        Request(f"{THOUGHT}{number}", {"num_predict": 40}, format=structural_tag(COUNT, tags))
    )
    if tag in tags:
        thought, _, content = answer.text.partition(tag)
        assert thought == ""
        assert json.loads(content) == {"n": json.loads(content)["n"]}
        assert answer.final.done_reason == DoneReason.STOP
    else:
        assert answer.text.startswith(f"{tag}.")
        assert answer.final.done_reason == DoneReason.LENGTH


async def test_an_answer_may_end_while_it_thinks(thinker: Client) -> None:
    answer = await thinker.complete(Request(f"{THOUGHT}0", format=structural_tag(COUNT, CLOSING)))
    assert (answer.text, answer.final.done_reason) == ("", DoneReason.STOP)


async def test_other_special_tokens_may_stand_in_the_thinking_and_not_in_the_answer(thinker: Client) -> None:
    answer = await thinker.complete(Request(f"{THOUGHT}5", {"num_predict": 5}, format=structural_tag(COUNT, CLOSING)))
    assert answer.text.startswith("<|other|>.")
    answer = await thinker.complete(Request("5", {"num_predict": 5}, format=structural_tag({"type": "string"})))
    assert answer.text.startswith('"')
    assert "<|" not in answer.text


async def test_every_line_carries_counters_that_add_up(thinker: Client) -> None:
    request = Request("x1", {"num_predict": 40}, format=structural_tag(COUNT, CLOSING), intermediate_metrics=True)
    answer = await thinker.complete(request)
    counts = [line.eval_count for line in answer.answers]
    assert counts == sorted(counts)
    assert counts[0] > 0
    assert counts[-1] == len(answer.text) - len("</think>") + 1


async def test_the_second_pass_of_structured_output_reuses_the_first_prefill(thinker: Client) -> None:
    """A host cancels the unconstrained answer when the thinking ends and sends a second request that continues it."""
    prompt = "system: be brief. user: how many?" * 8 + THOUGHT
    said = ""
    async with thinker.stream(Request(f"{prompt}1", {"num_predict": 2000}, intermediate_metrics=True)) as stream:
        async for answer in stream:
            said += answer.content
            if len(said) > len("</think>..."):
                break
    thought = said[: said.index("</think>") + len("</think>")]
    second = Request(f"{prompt}1{thought}", {"num_predict": 60}, format=structural_tag(COUNT))
    completion = await thinker.complete(second)
    assert [*json.loads(completion.text)] == ["n"]
    # The closing tag is one token in the answer but eight in the prompt; everything before it is cached.
    assert completion.final.prompt_eval_cached_count == len(thinker_tokens(f"{prompt}1"))
    third = await thinker.complete(second)
    assert third.text == completion.text
    assert third.final.prompt_eval_cached_count == third.final.prompt_eval_count - 1


def thinker_tokens(text: str) -> list[str]:
    """Returns the tokens of a text: one for each marker, one for every other byte."""
    return [*"".join(text.split("<think>")), *["<think>"] * text.count("<think>")]


# --- invalid formats


BAD = [
    (5, 'Format: expected "json", a JSON schema'),
    ({"type": "structural_tag"}, "Format: Object missing required field `format`"),
    (
        {"type": "structural_tag", "format": {"type": "no such kind"}},
        "Format: Invalid value 'no such kind' - at `$.format.type`",
    ),
    (structural_tag({"type": 5}), "Format: type must be a string"),
    (
        structural_tag({"type": "object", "properties": {"a": {"not": {}}}}),
        'Format: Unimplemented keys: ["not"] - at `$.properties.a`',
    ),
    ({"type": "lark", "grammar": "start: nowhere"}, 'Format: at 1(8): unknown name: "nowhere"'),
    ({"type": "regex", "pattern": "("}, "Format: invalid regex"),
    (structural_tag({"type": "object", "description": "x" * (1 << 20)}), "Format: a schema of 10486"),
]


@pytest.mark.parametrize(("wanted", "text"), BAD)
async def test_an_invalid_format_is_refused_and_the_next_request_is_right(
    thinker: Client, wanted: object, text: str
) -> None:
    with pytest.raises(StatusError) as refusal:
        await thinker.complete(Request("x", format=wanted))
    assert refusal.value.status == 400
    assert str(refusal.value).find(text) >= 0, str(refusal.value)
    answer = await thinker.complete(Request("x", {"num_predict": 3}))
    assert answer.text == "..."


async def test_a_schema_nested_too_deep_is_refused(thinker: Client) -> None:
    schema: object = {"type": "string"}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    with pytest.raises(StatusError, match="nested deeper than 128 levels"):
        await thinker.complete(Request("x", format=structural_tag(schema)))
