"""Pictures that are too large, too many, or left alone: refused for next to nothing, and nobody else notices."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

import pytest

from protocol.stats import Stats
from tests.process.hostile.onlooker import Onlooker, asking, black_png, head, open_onlooker
from tests.process.hostile.victim import PATIENCE_S, Victim, status_of

MEGABYTE = 1 << 20
REFUSAL_S = 0.1
"""The most processor time that a refusal may take. Most take a thirtieth of it."""
SLACK_BYTES = 48 * MEGABYTE
"""Memory that malloc may keep."""
ARENA_BYTES = 128 * MEGABYTE
"""Memory that malloc keeps of the first times: each thread has an arena of 64 MiB or two."""
CONTEXT = 6000
SPARE_THREADS = 2
"""Pools may have been smaller at first than they may become."""
FRONT = b'{"Prompt":"[img-0]Hi","Media":[{"id":0,"data":"'
BASE64 = b"iVBORw0KGgoAAAANSUhEUgAA" * (MEGABYTE // 24)


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Onlooker]:
    yield from open_onlooker(tmp_path_factory.mktemp("near"), CONTEXT)


@pytest.fixture
async def onlooker(near: Onlooker) -> AsyncIterator[Onlooker]:
    yield near
    await near.at_rest()


REFUSED: dict[str, tuple[Callable[[], Sequence[bytes]], int, str]] = {
    "a bomb": (
        lambda: [asking("[img-0]Hi", [black_png(50_000, 50_000, 4500)])],
        400,
        "decode image: 50000 x 50000 pixels exceed the limit of 100 megapixels: send a smaller picture",
    ),
    "a picture of 200 MB": (lambda: [FRONT, *[BASE64] * 200, b'"}]}'], 413, "the request has 2097"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_too_much_is_refused_for_next_to_nothing(name: str, onlooker: Onlooker) -> None:
    make, status, text = REFUSED[name]
    pieces, victim = make(), onlooker.victim
    seen = (await onlooker.stats()).media
    before, rss = victim.cpu_s(), victim.rss_bytes()
    answer = await onlooker.host(pieces)
    assert (status_of(answer), text in answer.decode()) == (status, True), answer
    assert victim.cpu_s() - before <= REFUSAL_S
    assert victim.rss_bytes() - rss < SLACK_BYTES
    async with onlooker.beside_a_story():
        assert status_of(await onlooker.host(pieces)) == status
    assert (await onlooker.at_rest()).media == seen


# --- clients that leave


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


async def settled(victim: Victim, most_bytes: int) -> int:
    """Waits until the process takes at most so much memory, and returns how much it takes."""
    limit = time.monotonic() + PATIENCE_S
    while (found := victim.rss_bytes()) > most_bytes:
        assert time.monotonic() < limit, f"{(found - most_bytes) >> 20} MiB more than it may take"
        await asyncio.sleep(0.1)
    return found


async def test_a_client_leaves_in_the_middle_of_a_picture(onlooker: Onlooker) -> None:
    victim = onlooker.victim
    before, rss = await onlooker.stats(), victim.rss_bytes()

    async def half_is_read() -> bool:
        return victim.rss_bytes() - rss > 10 * MEGABYTE

    stats = await leave(onlooker, [FRONT, *[BASE64] * 20], 40 * MEGABYTE, half_is_read)
    assert stats.requests.cancelled == before.requests.cancelled, "it never was one"
    assert stats.media == before.media
    await settled(victim, rss + SLACK_BYTES)


async def test_a_client_leaves_while_its_picture_is_encoded(onlooker: Onlooker) -> None:
    before, rss = await onlooker.stats(), onlooker.victim.rss_bytes()

    async def encodes() -> bool:
        return (await onlooker.stats()).slices.encode > before.slices.encode

    body = asking("[img-0]Hi", [black_png(2000, 2000, 2000)])
    stats = await leave(onlooker, [body], len(body), encodes)
    assert stats.requests.cancelled == before.requests.cancelled + 1
    assert stats.media.encoded == before.media.encoded
    assert stats.media.feature_bytes == before.media.feature_bytes
    await settled(onlooker.victim, rss + ARENA_BYTES)
