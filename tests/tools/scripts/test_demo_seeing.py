"""The talks of `scripts/demo` about pictures, with a runner that a host has spawned, in every way of computing them.

The same questions are answered by plain code in test_seeing_model.py.
"""

import asyncio
import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.tools.conformance.runners import caught
from scripts.tools.conformance.this_runner import RUNNER
from scripts.tools.demo import main as demo
from scripts.tools.demo.main import commands
from scripts.tools.demo.questions import Talk
from scripts.tools.demo.seeing import PICTURES, RED, TALKS, held_out_looks
from scripts.tools.demo.subjects import GREEDY, SEEING_MODEL, demo_store, seeing_subject
from scripts.tools.host.lib import Answer, Client, G, Medium, Process, Request, spawn

HOST = replace(G, request_timeout_s=120.0)
SOFT = 80
"""Tokens of each picture of the talks."""


@pytest.fixture(scope="module")
def store() -> Iterator[Path]:
    with demo_store(SEEING_MODEL) as models:
        yield models


@contextmanager
def started(store: Path, *arguments: str) -> Iterator[Process]:
    with spawn(RUNNER, SEEING_MODEL, models_dir=store, generation=HOST, arguments=arguments) as process:
        process.wait_ready(60)
        yield process
        assert not caught(process)


async def say(client: Client, prompt: str, pictures: Sequence[bytes]) -> tuple[str, Answer]:
    """Returns an answer, and its last line."""
    text = ""
    async with client.stream(Request(prompt, GREEDY, media=[Medium(picture) for picture in pictures])) as stream:
        async for answer in stream:
            text += answer.content
    return text, answer


async def hold(client: Client, talk: Talk) -> list[int]:
    """Holds a talk, whose answers must be the right ones. Returns the number of cached tokens of each turn."""
    cached = []
    for turn, right in enumerate(talk.answers):
        text, final = await say(client, talk.prompt(turn), talk.pictures)
        assert text == right, f"{talk.title}: {talk.told(turn)}"
        cached.append(final.prompt_eval_cached_count or 0)
    return cached


WAYS = [
    *((cache, chunk) for cache in ("trie", "single", "none") for chunk in (2048, 128, 33)),
    ("trie", 7),
]


@pytest.mark.parametrize(("cache", "chunk"), WAYS)
async def test_every_talk_is_right(store: Path, cache: str, chunk: int) -> None:
    with started(store, "--cache", cache, "--prefill-chunk", str(chunk)) as process:
        async with Client.of(process) as client:
            for talk in (*TALKS, *TALKS):
                cached = await hold(client, talk)
                if cache == "none":
                    assert not any(cached)
                else:
                    assert min(cached[1:]) > SOFT  # the next turn does not read the picture again


async def test_the_same_picture_again_is_cached_and_another_one_is_not(store: Path) -> None:
    with started(store) as process:
        async with Client.of(process) as client:
            first, other, again, *_ = TALKS
            assert (await hold(client, first))[0] == 0
            assert (await hold(client, other))[0] < SOFT
            assert (await hold(client, again))[0] > SOFT


async def test_keys_and_values_of_eight_bits_are_enough(store: Path) -> None:
    with started(store, "--kv-bits", "8") as process:
        async with Client.of(process) as client:
            for talk in TALKS:
                await hold(client, talk)


async def test_streams_at_once_are_each_answered_by_their_own_pictures(store: Path) -> None:
    looks = held_out_looks(12, seed=7)
    with started(store, "--parallel", "6") as process:
        async with Client.of(process) as client:
            alone = [(await say(client, look.prompt, look.pictures))[0] for look in looks]
    assert sum(text == look.answer for text, look in zip(alone, looks, strict=True)) >= 11
    with started(store, "--parallel", "6", "--prefill-chunk", "50") as process:
        async with Client.of(process) as client:
            for _ in range(2):  # computed, and from the cache
                together = await asyncio.gather(*(say(client, look.prompt, look.pictures) for look in looks))
                assert [text for text, _ in together] == alone


async def test_the_demo_finds_wrong_pictures(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, *_, two, _ = TALKS
    red, blue = PICTURES.values()
    with started(store) as process:
        async with Client.of(process) as client:
            for talk in (one, two):
                assert await demo.hold(client, talk, range(len(talk.questions)), GREEDY)
            assert "WRONG" not in capsys.readouterr().out
            for talk in (replace(one, pictures=[blue]), replace(two, pictures=[blue, red])):
                assert not await demo.hold(client, talk, range(len(talk.questions)), GREEDY)
                assert capsys.readouterr().out.count("WRONG") == len(talk.questions)
    assert "[a red circle at the top left] What do you see?" in one.told(0)


def test_the_command_to_try_shows_the_picture(store: Path, tmp_path: Path) -> None:
    subject = seeing_subject(store)
    with started(store) as process:
        *_, command = commands(subject, f"http://127.0.0.1:{process.port}", tmp_path)
        output = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    lines = [json.loads(line) for line in output.splitlines()]
    assert "".join(line.get("Content", "") for line in lines) == RED.sentence
