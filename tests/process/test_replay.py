"""`--record` and `mlx-runner replay`: what a process did is computed again by another one, which comes to the same."""

import asyncio
import json
import random
import re
from pathlib import Path

import pytest

from scripts.tools.host.lib import Client, Process, Request, StatusError
from scripts.tools.host.lib.generations import G
from tests.process.conftest import RANDOM, SpawnModel, command, read_stats

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPTS = ("so many words about zebras " * 9, "once upon a time " * 12, "so many words about zebras and lions " * 6)


async def ask_all(process: Process, chance: random.Random) -> None:
    """Sends requests of all sorts, several at once; some clients leave, and one format is refused."""
    async with Client.of(process) as client:

        async def ask(number: int) -> None:
            options: dict[str, object] = {
                "num_predict": chance.choice((3, 40, 120)),
                "temperature": chance.choice((0, 0.9)),
            }
            if chance.random() < 0.3:
                options["stop"] = ["e", "qu"]
            wanted = PERSON if chance.random() < 0.4 else None
            request = Request(chance.choice(PROMPTS), options, format=wanted, logprobs=chance.random() < 0.3)
            await client.complete(request, cancel_after=chance.choice((None, None, 1, 4)))
            if number % 4 == 0:
                await read_stats(client)

        rows = [{"prompt": prompt, "candidates": ["A", "B"]} for prompt in PROMPTS]
        for _ in range(3):
            scores = client.send("POST", "/v1/score", json.dumps({"max_tokens": 900, "rows": rows}).encode())
            await asyncio.gather(scores, *map(ask, range(chance.randint(1, 6))))
            await asyncio.sleep(chance.choice((0, 0.4)))
        with pytest.raises(StatusError):
            await client.complete(Request("x", {}, format={"type": "regex", "pattern": "("}))
        await client.complete(Request(PROMPTS[0], {"num_predict": 12}))


async def test_what_a_killed_process_did_is_replayed(start: SpawnModel, tmp_path: Path, models_dir: Path) -> None:
    file = tmp_path / "tape"
    words = ["--record", str(file), "--parallel", "2", "--cache-memory", "600K", "--draft-tokens", "3"]
    process = start(RANDOM, words, generation=G)
    await ask_all(process, random.Random(6))
    process.kill()
    assert file.stat().st_mode & 0o777 == 0o600
    done = command("replay", str(file), "--models-dir", str(models_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.fullmatch(r"(\d+) requests, (\d+) slices: equal", done.stdout.splitlines()[-1])
    assert found is not None, done.stdout
    assert int(found[1]) >= 5 + 3 * len(PROMPTS)
    assert file.stat().st_size <= 200 * int(found[2]) + 40_000, "200 bytes a slice, beside prompts"
