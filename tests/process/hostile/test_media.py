"""Pictures and sounds that are too large, invalid, or left alone: refused for next to nothing, and nobody else
notices."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from protocol.stats import Stats
from scripts.tools.models.wav import FLOAT, chunk, fmt, noise, pack, wav, wave
from tests.process.hostile.onlooker import Onlooker, asking, black_png, head, open_onlooker
from tests.process.hostile.victim import PATIENCE_S, Victim, post, status_of

MEGABYTE = 1 << 20
REFUSAL_S = 0.1
"""The most processor time that a refusal may take. Most take a thirtieth of it."""
SLACK_BYTES = 48 * MEGABYTE
"""Memory that malloc may keep."""
ARENA_BYTES = 128 * MEGABYTE
"""Memory that malloc keeps of the first times: each thread has an arena of 64 MiB or two."""
SPARE_THREADS = 2
"""Pools may have been smaller at first than they may become."""
FRONT = b'{"Prompt":"[img-0]Hi","Media":[{"id":0,"data":"'
BASE64 = b"iVBORw0KGgoAAAANSUhEUgAA" * (MEGABYTE // 24)
SEEING, HEARING = "qwen3.5-seeing", "gemma4-hearing"
sees = pytest.mark.parametrize("near", [SEEING], indirect=True)
hears = pytest.mark.parametrize("near", [HEARING], indirect=True)


@pytest.fixture(scope="module")
def near(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Onlooker]:
    yield from open_onlooker(tmp_path_factory.mktemp("near"), 6000, request.param)


@pytest.fixture
async def onlooker(near: Onlooker) -> AsyncIterator[Onlooker]:
    yield near
    await near.at_rest()


async def check_refused(
    onlooker: Onlooker, pieces: Sequence[bytes], status: int, text: str, reading_s: float = 0.0, read_bytes: int = 0
) -> None:
    """Checks the answer, and that a refusal takes little beside reading the body: processor time and memory."""
    victim, seen = onlooker.victim, (await onlooker.stats()).media
    before, rss = victim.cpu_s(), victim.rss_bytes()
    answer = await onlooker.host(pieces)
    assert (status_of(answer), text in answer.decode()) == (status, True), answer
    assert victim.cpu_s() - before <= REFUSAL_S + 2 * reading_s
    assert victim.rss_bytes() - rss < SLACK_BYTES + 2 * read_bytes
    async with onlooker.beside_a_story():
        assert status_of(await onlooker.host(pieces)) == status
    assert (await onlooker.at_rest()).media == seen


PICTURES: dict[str, tuple[Callable[[], Sequence[bytes]], int, str]] = {
    "a bomb": (
        lambda: [asking("[img-0]Hi", [black_png(50_000, 50_000, 4500)])],
        400,
        "decode image: 50000 x 50000 pixels exceed the limit of 100 megapixels: send a smaller picture",
    ),
    "a picture of 200 MB": (lambda: [FRONT, *[BASE64] * 200, b'"}]}'], 413, "the request has 2097"),
}


@sees
@pytest.mark.parametrize("name", PICTURES)
async def test_a_picture_that_is_too_large_is_refused_for_next_to_nothing(name: str, onlooker: Onlooker) -> None:
    make, status, text = PICTURES[name]
    await check_refused(onlooker, make(), status, text)


DATA = chunk(b"data", pack(noise(1000)))
HOUR = wave(fmt(rate=8000, bits=8), chunk(b"data", bytes(3600 * 8000)))
NO_NUMBERS = wav(np.full(40 * 16_000, np.nan), bits=32, form=FLOAT)

SOUNDS = {
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


@hears
@pytest.mark.parametrize("name", SOUNDS)
async def test_a_file_without_sound_is_refused_for_next_to_nothing(name: str, onlooker: Onlooker) -> None:
    data, text = SOUNDS[name]
    body, victim = asking("[img-0]Hi", [data]), onlooker.victim
    no_channels = asking("[img-0]Hi", [wave(fmt(channels=0), chunk(b"data", bytes(len(data))))])
    before = victim.cpu_s()
    assert status_of(await onlooker.host([no_channels])) == 400
    await check_refused(onlooker, [body], 400, text, victim.cpu_s() - before, len(body))


@hears
async def test_a_sound_of_four_gigabytes_by_its_header_is_heard_to_the_end_of_the_file(onlooker: Onlooker) -> None:
    before = (await onlooker.stats()).media.encoded
    body = asking("[img-0]Hi", [wave(fmt(), chunk(b"data", pack(noise(9000)), 0xFFFFFFFF))])
    assert status_of(await onlooker.victim.exchange(post("/completion", body))) == 200
    async with asyncio.timeout(PATIENCE_S):
        while (await onlooker.stats()).media.encoded == before:
            await asyncio.sleep(0.01)


async def leave(onlooker: Onlooker, sent: Sequence[bytes], whole: int, reached: Callable[[], Awaitable[bool]]) -> Stats:
    """Sends the beginning of a request of `whole` bytes, leaves when a stage is reached, and waits until all is over.
    Checks that somebody else is answered, and that threads do not become more with every client."""
    async with onlooker.beside_a_story():
        _, writer = await onlooker.victim.open()
        writer.writelines([head(whole), *sent])
        async with asyncio.timeout(PATIENCE_S):
            await writer.drain()
            while not await reached():
                await asyncio.sleep(0.002)
        writer.transport.abort()
    stats = await onlooker.at_rest()
    assert len(onlooker.threads) <= onlooker.threads_at_first + SPARE_THREADS
    return stats


async def settled(victim: Victim, most_bytes: int) -> None:
    """Waits until the process takes at most `most_bytes` of memory."""
    limit = time.monotonic() + PATIENCE_S
    while (found := victim.rss_bytes()) > most_bytes:
        assert time.monotonic() < limit, f"{(found - most_bytes) >> 20} MiB more than it may take"
        await asyncio.sleep(0.1)


@sees
async def test_a_client_leaves_in_the_middle_of_a_picture(onlooker: Onlooker) -> None:
    victim = onlooker.victim
    before, rss = await onlooker.stats(), victim.rss_bytes()

    async def half_is_read() -> bool:
        return victim.rss_bytes() - rss > 10 * MEGABYTE

    stats = await leave(onlooker, [FRONT, *[BASE64] * 20], 40 * MEGABYTE, half_is_read)
    assert stats.requests.cancelled == before.requests.cancelled, "it never was one"
    assert stats.media == before.media
    await settled(victim, rss + SLACK_BYTES)


def decoded_s(pid: int) -> float:
    """Returns the processor time that the children of a process have taken."""
    children = [each for task in Path(f"/proc/{pid}/task").glob("*/children") for each in task.read_text().split()]
    times = [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:13] for child in children]
    return sum(int(user) + int(system) for user, system in times) / os.sysconf("SC_CLK_TCK")


@hears
async def test_a_client_leaves_while_its_sound_is_measured(onlooker: Onlooker) -> None:
    before, rss = await onlooker.stats(), onlooker.victim.rss_bytes()
    body = asking("[img-0]Hi", [wave(fmt(rate=44_100, channels=2), chunk(b"data", bytes(4 * 44_100 * 400)))])
    first = decoded_s(onlooker.victim.process.pid)

    async def decodes() -> bool:
        return decoded_s(onlooker.victim.process.pid) > first + 0.05

    stats = await leave(onlooker, [body], len(body), decodes)
    assert stats.media == before.media
    await settled(onlooker.victim, rss + ARENA_BYTES)


@pytest.mark.parametrize(
    ("near", "make"),
    [(SEEING, lambda: black_png(2000, 2000, 2000)), (HEARING, lambda: wav(noise(180 * 8000), 8000, 8))],
    indirect=["near"],
    ids=["a picture", "a sound"],
)
async def test_a_client_leaves_while_its_medium_is_encoded(make: Callable[[], bytes], onlooker: Onlooker) -> None:
    before, rss = await onlooker.stats(), onlooker.victim.rss_bytes()

    async def encodes() -> bool:
        return (await onlooker.stats()).slices.encode > before.slices.encode

    body = asking("[img-0]Hi", [make()])
    stats = await leave(onlooker, [body], len(body), encodes)
    assert stats.requests.cancelled == before.requests.cancelled + 1
    assert stats.media.encoded == before.media.encoded
    assert stats.media.feature_bytes == before.media.feature_bytes
    await settled(onlooker.victim, rss + ARENA_BYTES)
