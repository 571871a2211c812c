"""The talks of `scripts/demo`: their prompts, the expected answers, and pictures with a runner that a host has spawned.

The same questions about pictures are answered by plain code in test_seeing_model.py.
"""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.tools.conformance.runners import caught
from scripts.tools.demo.hearing import FALLING, RISING, SOUNDS, known_looks
from scripts.tools.demo.hearing import TALKS as HEARD_TALKS
from scripts.tools.demo.plain import is_good
from scripts.tools.demo.questions import CONVERSATIONS, Conversation, Talk
from scripts.tools.demo.seeing import TALKS
from scripts.tools.demo.subjects import GREEDY, HEARING_MODEL, HEARING_WEIGHTS, SEEING_MODEL, demo_store
from scripts.tools.host.lib import Answer, Client, G, Medium, Process, Request
from tests.process.conftest import running


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda conversation: conversation.title)
def test_a_talk_with_the_demo_model_is_the_conversation(conversation: Conversation) -> None:
    talk = Talk.known(conversation)
    for number, turn in enumerate(conversation.turns):
        assert talk.prompt(number) == conversation.prompt(number)
        assert talk.expected(number, "anything") == turn.answer


HOST = replace(G, request_timeout_s=120.0)
SOFT = 80
"""Tokens of each picture of the talks."""


@pytest.fixture(scope="module")
def store() -> Iterator[Path]:
    with demo_store(SEEING_MODEL, HEARING_MODEL) as models:
        yield models


@contextmanager
def started(store: Path, *arguments: str, model: str) -> Iterator[Process]:
    with running(model, store, *arguments, generation=HOST) as process:
        yield process
        assert not caught(process)


async def say(client: Client, prompt: str, files: Sequence[bytes]) -> tuple[str, Answer]:
    """Returns an answer, and its last line."""
    text, media = "", [Medium(data, "audio" if data.startswith(b"RIFF") else "image") for data in files]
    async with client.stream(Request(prompt, GREEDY, media=media)) as stream:
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


async def hold_all(client: Client, talks: Sequence[Talk], cache: str, tokens: int) -> None:
    """Holds talks twice; a later turn does not read its picture or sound, of `tokens` tokens, again."""
    for talk in (*talks, *talks):
        cached = await hold(client, talk)
        assert not any(cached) if cache == "none" else min(cached[1:]) > tokens


@pytest.mark.parametrize(("cache", "chunk"), [("trie", 33), ("trie", 7), ("single", 128), ("none", 2048)])
async def test_every_talk_is_right(store: Path, cache: str, chunk: int) -> None:
    with started(store, "--cache", cache, "--prefill-chunk", str(chunk), model=SEEING_MODEL) as process:
        async with Client.of(process) as client:
            await hold_all(client, TALKS, cache, SOFT)


HEARD = 32
"""Tokens of each sound of the talks."""


@pytest.mark.parametrize(("cache", "chunk"), [("trie", 7), ("none", 2048)])
async def test_every_talk_about_sounds_is_right(store: Path, cache: str, chunk: int) -> None:
    with started(store, "--cache", cache, "--prefill-chunk", str(chunk), model=HEARING_MODEL) as process:
        async with Client.of(process) as client:
            await hold_all(client, HEARD_TALKS, cache, HEARD)
            rising, falling = HEARD_TALKS[:2]
            text, _ = await say(client, rising.prompt(0), [SOUNDS[FALLING]])
            assert text == falling.answers[0] != rising.answers[0], "the wrong sound gets its own answer"
            text, _ = await say(client, falling.prompt(0), [SOUNDS[RISING]])
            assert text == rising.answers[0]


@pytest.mark.full
def test_plain_code_gets_the_same_answers_about_sounds() -> None:
    """All tunes, each by a sound that was never trained; and nothing where there is no sound."""
    assert len(known_looks()) == 59
    assert is_good(HEARING_WEIGHTS)


async def test_a_sound_survives_a_restart_and_another_one_shares_nothing_of_it(store: Path, tmp_path: Path) -> None:
    """Behind a text that is long enough to be kept."""
    talk, other = HEARD_TALKS[:2]
    prompt, arguments = f"<|user|>{'word ' * 300}{talk.prompt(0)}", ("--disk-cache", str(tmp_path))
    with started(store, *arguments, model=HEARING_MODEL) as process:
        async with Client.of(process) as client:
            first, final = await say(client, prompt, talk.pictures)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) is not None
    with started(store, *arguments, model=HEARING_MODEL) as process:
        async with Client.of(process) as client:
            again, right = await say(client, prompt, talk.pictures)
            _, wrong = await say(client, prompt, other.pictures)
    front = final.prompt_eval_count - HEARD  # with the question behind the sound
    assert again == first
    assert (wrong.prompt_eval_cached_count or 0) < front < (right.prompt_eval_cached_count or 0)
