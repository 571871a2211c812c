"""Runners that share a directory are killed at any moment: every answer is right, and the bound holds."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from scripts.tools.host.lib import Client, Process, Request
from tests.process.conftest import RANDOM, SpawnModel

STARTS = ("so many words about zebras " * 12, "and as many about the okapi " * 12)
BOUND = 3 << 20


def prompt_of(numbers: Random) -> str:
    start = numbers.choice(STARTS)
    return start[: numbers.choice((300, 320, len(start)))] + numbers.choice(("", "a", "in the rain"))


def held_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


async def ask(process: Process, prompt: str) -> str:
    async with Client.of(process) as client:
        return (await client.complete(Request(prompt, {"num_predict": 4, "temperature": 0}))).text


async def killed(kills: int, seed: int, start: SpawnModel, directory: Path) -> None:
    numbers, right = Random(seed), dict[str, str]()
    plain = start(RANDOM)
    words = ["--disk-cache", str(directory), "--disk-memory", str(BOUND)]
    for _ in range(kills):
        processes = [start(RANDOM, words) for _ in range(numbers.choice((1, 1, 2)))]
        for _ in range(numbers.randrange(1, 4)):
            prompt = prompt_of(numbers)
            if prompt not in right:
                right[prompt] = await ask(plain, prompt)
            for text in await asyncio.gather(*(ask(process, prompt) for process in processes)):
                assert text == right[prompt], prompt
        for process in processes:
            await asyncio.sleep(numbers.random() * 0.02)  # in the middle of whatever it writes
            process.kill()
            assert not any("level=ERROR" in line for line in process.output.lines)
    # What was written since the last sweep may be above the bound.
    assert held_bytes(directory) <= 2 * BOUND


async def test_three_kills(start: SpawnModel, tmp_path: Path) -> None:
    await killed(3, 1, start, tmp_path / "kept")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
async def test_two_hundred_kills(seed: int, start: SpawnModel, tmp_path: Path) -> None:
    await killed(20, seed, start, tmp_path / "kept")
