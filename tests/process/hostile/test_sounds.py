"""Sounds that claim too much, are none, or are left alone: refused for next to nothing, and nobody else notices."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from scripts.tools.models.wav import FLOAT, chunk, fmt, noise, pack, wav, wave
from tests.process.hostile.onlooker import Onlooker, asking, open_onlooker
from tests.process.hostile.test_pictures import ARENA_BYTES, REFUSAL_S, SLACK_BYTES, leave, settled
from tests.process.hostile.victim import PATIENCE_S, post, status_of

CONTEXT = 6000


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Onlooker]:
    yield from open_onlooker(tmp_path_factory.mktemp("near"), CONTEXT, "gemma4-hearing")


@pytest.fixture
async def onlooker(near: Onlooker) -> AsyncIterator[Onlooker]:
    yield near
    await near.at_rest()


DATA = chunk(b"data", pack(noise(1000)))
HOUR = wave(fmt(rate=8000, bits=8), chunk(b"data", bytes(3600 * 8000)))
NO_NUMBERS = wav(np.full(40 * 16_000, np.nan), bits=32, form=FLOAT)
REFUSED = {
    "4 GB by its header, and nothing": (wave(fmt(), chunk(b"data", b"", 0xFFFFFFFF)), "audio too short"),
    "a million chunks": (wave(fmt(), *[chunk(b"junk", b"")] * 1_000_000, DATA), "wav: more than 4096 chunks"),
    "no numbers": (wav(np.full(1000, np.nan), bits=32, form=FLOAT), "wav: a sample is not a finite number"),
    "many no numbers": (NO_NUMBERS, "wav: a sample is not a finite number"),
    "192 channels": (wave(fmt(channels=192), DATA), "wav: 192 channels at 16000 Hz exceed the limit of"),
    "no channels": (wave(fmt(channels=0), DATA), "wav: invalid fmt: 0 channels at 16000 Hz"),
    "no rate": (wave(fmt(rate=0), DATA), "wav: invalid fmt: 1 channels at 0 Hz"),
    "4 GHz": (wave(fmt(rate=0xFFFFFFFF), DATA), "wav: 1 channels at 4294967295 Hz exceed the limit of"),
    "an hour": (HOUR, "audio longer than 600 seconds"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_no_sound_is_refused_for_next_to_nothing(name: str, onlooker: Onlooker) -> None:
    data, text = REFUSED[name]
    body, victim = [asking("[img-0]Hi", [data])], onlooker.victim
    no_channels = [asking("[img-0]Hi", [wave(fmt(channels=0), chunk(b"data", bytes(len(data))))])]
    seen = (await onlooker.stats()).media
    before = victim.cpu_s()
    assert status_of(await onlooker.host(no_channels)) == 400
    reading_s = victim.cpu_s() - before  # a body takes its own time to be read
    before, rss = victim.cpu_s(), victim.rss_bytes()
    answer = await onlooker.host(body)
    assert (status_of(answer), text in answer.decode()) == (400, True), answer
    assert victim.cpu_s() - before <= REFUSAL_S + 2 * reading_s
    assert victim.rss_bytes() - rss < SLACK_BYTES + 2 * len(body[0])
    async with onlooker.beside_a_story():
        assert status_of(await onlooker.host(body)) == 400
    assert (await onlooker.at_rest()).media == seen


async def test_a_sound_of_four_gigabytes_by_its_header_is_heard_as_far_as_it_goes(onlooker: Onlooker) -> None:
    before = (await onlooker.stats()).media.encoded
    body = asking("[img-0]Hi", [wave(fmt(), chunk(b"data", pack(noise(9000)), 0xFFFFFFFF))])
    assert status_of(await onlooker.victim.exchange(post("/completion", body))) == 200
    async with asyncio.timeout(PATIENCE_S):
        while (await onlooker.stats()).media.encoded == before:
            await asyncio.sleep(0.01)


def decoded_s(pid: int) -> float:
    """Returns the processor time that the children of a process have taken."""
    children = [each for task in Path(f"/proc/{pid}/task").glob("*/children") for each in task.read_text().split()]
    times = [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:13] for child in children]
    return sum(int(user) + int(system) for user, system in times) / os.sysconf("SC_CLK_TCK")


async def test_a_client_leaves_while_its_sound_is_measured(onlooker: Onlooker) -> None:
    before, rss = await onlooker.stats(), onlooker.victim.rss_bytes()
    body = asking("[img-0]Hi", [wave(fmt(rate=44_100, channels=2), chunk(b"data", bytes(4 * 44_100 * 400)))])

    first = decoded_s(onlooker.victim.process.pid)

    async def decodes() -> bool:
        return decoded_s(onlooker.victim.process.pid) > first + 0.05

    stats = await leave(onlooker, [body], len(body), decodes)
    assert stats.media == before.media
    await settled(onlooker.victim, rss + ARENA_BYTES)


async def test_a_client_leaves_while_its_sound_is_encoded(onlooker: Onlooker) -> None:
    before, rss = await onlooker.stats(), onlooker.victim.rss_bytes()

    async def encodes() -> bool:
        return (await onlooker.stats()).slices.encode > before.slices.encode

    body = asking("[img-0]Hi", [wav(noise(180 * 8000), 8000, 8)])
    stats = await leave(onlooker, [body], len(body), encodes)
    assert stats.requests.cancelled == before.requests.cancelled + 1
    assert stats.media.encoded == before.media.encoded
    assert stats.media.feature_bytes == before.media.feature_bytes
    await settled(onlooker.victim, rss + ARENA_BYTES)
