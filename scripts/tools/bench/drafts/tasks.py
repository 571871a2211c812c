"""What people ask a trained model for: edits, quotations, records, calls of tools, and free text."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import NamedTuple

import msgspec

from protocol.stats import DraftCounts, Stats
from scripts.tools import ROOT
from scripts.tools.host.lib import Client, Request

_SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
_USER, _ANSWER = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
_END = "<|im_end|>\n"
_NAMES = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "June", "Kurt", "Lena")
_CITIES = ("Lisbon", "Oslo", "Quito", "Turin", "Perth", "Lagos", "Kyoto", "Lima")
_FILES = ("reader", "writer", "parser", "loader", "planner", "printer")


class Turn(NamedTuple):
    """A question, and the format of its answer."""

    text: str
    format: object = None


class Done(NamedTuple):
    """A session of one task: tokens per second of all answers, tokens per forward of their decode, and their texts."""

    tokens_per_s: float
    tokens_per_forward: float
    texts: Sequence[str]


def _edit(random: Random) -> list[Turn]:
    name, number = random.choice(_FILES), random.randrange(1000)
    code = f"""def {name}_{number}(values):
    total = 0
    count = 0
    for value in values:
        if value is None:
            continue
        total += value
        count += 1
    if count == 0:
        return 0
    return total / count


def show_{number}(values):
    print("the mean is", {name}_{number}(values))
"""
    return [
        Turn(f"```python\n{code}```\nRename the variable total to sum_of_values. Answer with the whole code."),
        Turn("Now skip negative values, too. Answer with the whole code."),
    ]


def _quote(random: Random) -> list[Turn]:
    words = " ".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))).split()
    start = random.randrange(len(words) - 90)
    return [Turn(f"Repeat this text word for word:\n\n{' '.join(words[start : start + 90])}")]


def _records(random: Random) -> list[Turn]:
    people = [(name, random.randrange(20, 70), random.choice(_CITIES)) for name in random.sample(_NAMES, 5)]
    text = " ".join(f"{name} is {age} years old and lives in {city}." for name, age, city in people)
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}}
    record = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return [Turn(f"{text}\nList all people as JSON.", {"type": "array", "items": record, "minItems": 5, "maxItems": 5})]


def _calls(random: Random) -> list[Turn]:
    folder = f"project{random.randrange(1000)}"
    turns = []
    for number, name in enumerate(random.sample(_FILES, 4)):
        path = f"{folder}/src/{name}.py"
        example = f'<tool>{{"name": "read_file", "arguments": {{"path": "{folder}/src/main.py"}}}}</tool>'
        turns.append(
            Turn(
                f"Call the tool read_file for {path}. Write it like this: {example}"
                if not number
                else f"The tool answered: ok, {random.randrange(99)} lines. Call it for {path} in the same way."
            )
        )
    return turns


def _story(random: Random) -> list[Turn]:
    return [Turn(f"Write a story about {random.choice(_NAMES)} and a lighthouse in {random.choice(_CITIES)}.")]


TASKS: Mapping[str, tuple[Callable[[Random], list[Turn]], int]] = {
    "edit": (_edit, 160),
    "quote": (_quote, 128),
    "records": (_records, 160),
    "calls": (_calls, 48),
    "story": (_story, 128),
}
"""By name: what makes the turns of a session, and the most tokens of each answer."""


async def hold(client: Client, task: str, seed: int) -> Done:
    """Holds a session, each turn behind the answers before it. The seed chooses names, numbers and passages."""
    make, most = TASKS[task]
    prompt, texts = _SYSTEM, []
    seconds, tokens, accepted = 0.0, 0, await _accepted(client)
    for turn in make(Random(f"{task} {seed}")):
        prompt += f"{_USER}{turn.text}{_ANSWER}"
        answer = await client.complete(Request(prompt, {"num_predict": most}, format=turn.format))
        prompt += answer.text + _END
        texts.append(answer.text)
        tokens += answer.final.eval_count
        seconds += answer.final.eval_duration / 1e9
    return Done(tokens / seconds, tokens / (tokens - (await _accepted(client) - accepted)), texts)


async def _accepted(client: Client) -> int:
    """Returns the drafts that were right so far."""
    return sum((await draft_counts(client)).accepted.values())


async def draft_counts(client: Client) -> DraftCounts:
    """Returns what a runner has drafted so far."""
    return msgspec.json.decode((await client.send("GET", "/v1/stats")).body, type=Stats).drafts
