"""Runners that share a directory are killed at any moment, and directories fail or vanish: every answer is right."""

import asyncio
import os
import shutil
import sys
from pathlib import Path
from random import Random

import pytest

from scripts.tools.host.lib import Client, Process, Request
from tests.process.conftest import RANDOM, RUNNER, SpawnModel, read_stats

STARTS = ("so many words about zebras " * 12, "and as many about the okapi " * 18)
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
        assert held_bytes(directory) <= BOUND * 5 // 4  # a segment more at most, and that is a quarter


async def test_three_kills(start: SpawnModel, tmp_path: Path) -> None:
    await killed(3, 1, start, tmp_path / "kept")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
async def test_two_hundred_kills(seed: int, start: SpawnModel, tmp_path: Path) -> None:
    await killed(20, seed, start, tmp_path / "kept")


def damage(directory: Path) -> list[Path]:
    """Changes the sign of each token of one segment, and puts a pipe in the place of another. Returns their paths."""
    signs, pipe = sorted(directory.rglob("*.0-256.kv"))
    data = bytearray(signs.read_bytes())
    at = 8 + int.from_bytes(data[:8], "little")
    for token in range(256):
        data[at + 4 * token + 3] ^= 0x80
    signs.write_bytes(data)
    pipe.unlink()
    os.mkfifo(pipe)
    return [signs, pipe]


async def test_damaged_files_cost_no_answer_and_do_not_stay(start: SpawnModel, tmp_path: Path) -> None:
    words, plain = ["--disk-cache", str(tmp_path / "kept")], start(RANDOM)
    process = start(RANDOM, words)
    for prompt in STARTS:
        await ask(process, prompt)
    async with Client.of(process) as client:
        while (await read_stats(client)).disk.pending_tokens:
            await asyncio.sleep(0.05)
    process.kill()
    damaged = damage(tmp_path)
    again = start(RANDOM, words)
    for prompt in (STARTS[0][:290] + "in the rain", STARTS[1][:380] + "in the rain", *STARTS):
        assert await ask(again, prompt) == await ask(plain, prompt)
    while not all(map(Path.is_file, damaged)):  # written anew
        await asyncio.sleep(0.05)
    async with Client.of(again) as client:
        disk = (await read_stats(client)).disk
    assert (disk.state, disk.write_errors, disk.rejected) == ("on", 0, {"crc": 1})
    assert len(lines(again, "a file of the disk cache is damaged: removed")) == 1
    assert not lines(again, "level=ERROR")


LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
os.execvp(sys.argv[1], sys.argv[1:])
"""


def lines(process: Process, message: str) -> list[str]:
    return [line for line in process.output.lines if message in line]


async def test_a_full_disk_costs_no_answer_and_one_line(start: SpawnModel, tmp_path: Path) -> None:
    """No file may grow beyond 9,000 bytes: what describes the model can be written, and no segment."""
    directory = tmp_path / "kept"
    process = start(RANDOM, ["--disk-cache", str(directory)], executable=(sys.executable, "-c", LIMITED, *RUNNER))
    plain = start(RANDOM)
    for prompt in (*STARTS, STARTS[0]):
        assert await ask(process, prompt) == await ask(plain, prompt)
    async with Client.of(process) as client:
        while not (await read_stats(client)).disk.write_errors:
            await asyncio.sleep(0.05)
        assert (await read_stats(client)).disk.write_errors == 1
    assert await ask(process, STARTS[1]) == await ask(plain, STARTS[1])
    (line,) = lines(process, "disk cache rests")
    assert "File too large" in line
    assert not lines(process, "level=ERROR")
    assert {path.name for path in directory.rglob("*") if path.is_file()} == {"about.json", "tally"}


async def test_a_directory_that_is_removed_is_begun_anew(start: SpawnModel, tmp_path: Path) -> None:
    directory = tmp_path / "kept"
    words = ["--disk-cache", str(directory)]
    process, plain = start(RANDOM, words), start(RANDOM)
    for prompt in STARTS:
        assert await ask(process, prompt) == await ask(plain, prompt)
        while not list(directory.rglob("*.kv")):
            await asyncio.sleep(0.05)
        if prompt == STARTS[0]:
            shutil.rmtree(directory)
    async with Client.of(process) as client:
        while (await read_stats(client)).disk.pending_tokens:
            await asyncio.sleep(0.05)
    assert directory.stat().st_mode & 0o777 == 0o700
    process.kill()
    again = start(RANDOM, words)
    for prompt in STARTS:
        assert await ask(again, prompt) == await ask(plain, prompt)
    assert len(lines(again, "restored from disk")) == 1
    assert not lines(process, "level=ERROR")
    assert not lines(process, "level=WARN")
