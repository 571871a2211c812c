"""`--disk-cache`: a process that is killed leaves its conversations to the next one."""

import asyncio
import signal
from pathlib import Path

import pytest

from scripts.tools.host.lib import Client, Process, Request
from tests.process.conftest import RANDOM, SpawnModel, read_stats

PROMPT = "so many words about zebras " * 14


async def written(client: Client) -> None:
    """Returns when everything in memory is on disk."""
    while (await read_stats(client)).disk.pending_tokens or not (await read_stats(client)).disk.segments:
        await asyncio.sleep(0.05)


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
    longer, cached = await answer(start(RANDOM, words), PROMPT + text + " and more")
    plain, none = await answer_alone(start, PROMPT + text + " and more")
    assert (longer, none) == (plain, 0)
    assert cached > 300
    assert not any(path.stat().st_mode & 0o077 for path in (tmp_path / "kept").rglob("*"))


TOLD = "so many words about zebras " * 40


async def restored(start: SpawnModel, directory: Path, prompt: str) -> int:
    """Returns the tokens of a prompt that a new process finds on disk."""
    process = start(RANDOM, ["--disk-cache", str(directory)])
    async with Client.of(process) as client:
        await client.complete(Request(prompt, {"num_predict": 1, "temperature": 0}))
        return (await read_stats(client)).disk.restored_tokens


async def test_a_process_that_is_killed_with_its_last_token_leaves_the_prompt(
    start: SpawnModel, tmp_path: Path
) -> None:
    """As by a host with keep_alive 0, which does not ask whether anything is left to write."""
    process = start(RANDOM, ["--disk-cache", str(tmp_path)])
    async with Client.of(process) as client:
        found = await client.complete(Request(TOLD, {"num_predict": 800, "temperature": 0}))
        process.kill()
    assert await restored(start, tmp_path, TOLD) > found.final.prompt_eval_count - 256


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_leaves_all_of_the_conversation(number: int, start: SpawnModel, tmp_path: Path) -> None:
    process = start(RANDOM, ["--disk-cache", str(tmp_path)])
    async with Client.of(process) as client:
        found = await client.complete(Request(TOLD, {"num_predict": 6, "temperature": 0}))
        process.send_signal(number)
    assert process.wait(60) == -number
    assert not process.output.captured
    assert await restored(start, tmp_path, TOLD + found.text + "!") > found.final.prompt_eval_count


async def answer_alone(start: SpawnModel, prompt: str) -> tuple[str, int]:
    process = start(RANDOM)
    async with Client.of(process) as client:
        found = await client.complete(Request(prompt, {"num_predict": 6, "temperature": 0}))
        stats = await read_stats(client)
    assert stats.disk.state == "none"
    return found.text, stats.tokens.cached


async def test_a_cache_of_one_conversation_is_not_kept(start: SpawnModel, tmp_path: Path) -> None:
    process = start(RANDOM, ["--disk-cache", str(tmp_path / "kept"), "--cache", "single"])
    assert any("no disk cache" in line and "--cache trie" in line for line in process.output.lines)
    assert not (tmp_path / "kept").exists()
