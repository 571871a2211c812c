"""`--disk-cache`: a process that is killed leaves its conversations to the next one."""

import asyncio
import signal
from pathlib import Path
from random import Random

from scripts.tools.host.lib import Client, Process, Request
from tests.process.conftest import RANDOM, SpawnModel, read_stats, written

PROMPT = "so many words about zebras " * 14


async def answer(process: Process, prompt: str) -> tuple[str, int]:
    """Returns an answer and the tokens that were cached, and kills the process when all is written."""
    async with Client.of(process) as client:
        found = await client.complete(Request(prompt, {"num_predict": 6, "temperature": 0}))
        await written(client)
        stats = await read_stats(client)
    assert stats.disk.state == "on"
    process.kill()
    return found.text, stats.tokens.cached


async def test_a_killed_process_leaves_its_conversations(start: SpawnModel, tmp_path: Path) -> None:
    words = ["--disk-cache", str(tmp_path / "kept")]
    text, cached = await answer(start(RANDOM, words), PROMPT)
    assert cached == 0
    process = start(RANDOM, words)
    (told,) = [line for line in process.output.lines if 'msg="disk cache"' in line]
    assert f"directory={tmp_path / 'kept'}" in told
    assert told.rstrip().endswith("days=30")
    again, cached = await answer(process, PROMPT)
    assert again == text
    assert cached > 300
    assert any("restored from disk" in line for line in process.output.lines)
    assert any("msg=completion" in line and f" restored={cached} " in line for line in process.output.lines)
    assert not any(path.stat().st_mode & 0o077 for path in (tmp_path / "kept").rglob("*"))


TOLD = "so many words about zebras " * 40


async def restored(start: SpawnModel, directory: Path, prompt: str) -> int:
    """Returns the tokens of a prompt that a new process finds on disk."""
    process = start(RANDOM, ["--disk-cache", str(directory)])
    async with Client.of(process) as client:
        await client.complete(Request(prompt, {"num_predict": 1, "temperature": 0}))
        return (await read_stats(client)).disk.restored_tokens


async def test_a_process_that_is_killed_in_an_answer_leaves_the_prompt(start: SpawnModel, tmp_path: Path) -> None:
    """As by a host with keep_alive 0, which does not ask whether anything is left to write."""
    process = start(RANDOM, ["--disk-cache", str(tmp_path)])
    async with Client.of(process) as client:
        count = len(await client.tokenize(TOLD))
        async with client.stream(Request(TOLD, {"num_predict": 800, "temperature": 0})):
            while (await read_stats(client)).disk.segments < count // 256:
                await asyncio.sleep(0.05)
            process.kill()
    assert await restored(start, tmp_path, TOLD) > count - 256


async def test_a_signal_leaves_all_of_the_conversation(start: SpawnModel, tmp_path: Path) -> None:
    process = start(RANDOM, ["--disk-cache", str(tmp_path)])
    async with Client.of(process) as client:
        found = await client.complete(Request(TOLD, {"num_predict": 6, "temperature": 0}))
        process.send_signal(signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT
    assert not process.output.captured
    assert await restored(start, tmp_path, TOLD + found.text + "!") > found.final.prompt_eval_count


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


async def test_processes_that_share_a_directory_are_killed_at_any_moment(start: SpawnModel, tmp_path: Path) -> None:
    numbers, plain = Random(1), start(RANDOM)
    words = ["--disk-cache", str(tmp_path), "--disk-memory", str(BOUND)]
    for count in (1, 2, 2):
        processes = [start(RANDOM, words) for _ in range(count)]
        for prompt in (prompt_of(numbers), prompt_of(numbers)):
            right = await ask(plain, prompt)
            for text in await asyncio.gather(*(ask(process, prompt) for process in processes)):
                assert text == right, prompt
        for process in processes:
            await asyncio.sleep(numbers.random() * 0.02)  # in the middle of whatever it writes
            process.kill()
            assert not any("level=ERROR" in line for line in process.output.lines)
        assert held_bytes(tmp_path) <= BOUND * 5 // 4  # a segment more at most, and that is a quarter
