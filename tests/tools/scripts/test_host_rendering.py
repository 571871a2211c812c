"""Templates that go too far: each has its end, and nobody waits for another's."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest

from scripts.tools.host.template import Renderer, RenderingError

HELLO = "{{ word }}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{{ 'x' * 9000000000 }}"
LONG = "{{ 'x' * 20000000 }}"
DEEP = "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"
BUSY = "{{ 7 ** (2 ** 27) }}"
"""One operation, in which Python looks for no signal."""


@pytest.fixture
async def renderer() -> AsyncIterator[Renderer]:
    renderer = Renderer(limit_s=1)
    yield renderer
    await renderer.close()


def processes(renderer: Renderer) -> list[int]:
    return [process.pid for process in renderer._idle]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (ENDLESS, "the chat template did not end within 1 s"),
        (BUSY, "the chat template did not end within 1 s"),
        (HUGE, "the chat template takes too much memory"),
        (LONG, "the chat template makes a prompt of more than 16777216 characters"),
        (DEEP, "RecursionError"),
    ],
    ids=["endless", "busy", "huge", "long", "deep"],
)
async def test_a_template_that_goes_too_far_is_an_error_and_the_next_one_is_rendered(
    template: str, reason: str
) -> None:
    renderer = Renderer(limit_s=1 if "1 s" in reason else 60)
    with pytest.raises(RenderingError, match=reason):
        await renderer.render(template, {})
    assert await renderer.render(HELLO, {"word": "hello"}) == "hello"
    await renderer.close()


async def test_the_event_loop_goes_on_and_so_do_other_chats() -> None:
    renderer = Renderer(limit_s=60)
    endless = asyncio.create_task(renderer.render(ENDLESS, {}))
    await asyncio.sleep(0.2)
    assert [await renderer.render(HELLO, {"word": word}) for word in "abc"] == ["a", "b", "c"]
    assert not endless.done()
    endless.cancel()
    await asyncio.wait([endless])
    await renderer.close()


async def test_more_of_them_than_places_end_one_after_the_other(renderer: Renderer) -> None:
    endless = [asyncio.create_task(renderer.render(ENDLESS, {})) for _ in range(6)]
    await asyncio.sleep(0)
    assert await renderer.render(HELLO, {"word": "at last"}) == "at last"
    found = await asyncio.gather(*endless, return_exceptions=True)
    assert [type(each) for each in found] == [RenderingError] * 6


async def test_whoever_leaves_takes_the_rendering_along(renderer: Renderer) -> None:
    await renderer.render(HELLO, {"word": ""})
    (process,) = renderer._idle
    endless = asyncio.create_task(renderer.render(ENDLESS, {}))
    await asyncio.sleep(0.2)
    endless.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await endless
    assert await asyncio.wait_for(process.wait(), 30) == -signal.SIGKILL, "not by its alarm"
    assert processes(renderer) == []


async def test_a_process_serves_many_chats_and_one_that_was_ended_is_replaced(renderer: Renderer) -> None:
    await renderer.render(HELLO, {"word": ""})
    (first,) = processes(renderer)
    await renderer.render(HELLO, {"word": ""})
    assert processes(renderer) == [first]
    os.kill(first, signal.SIGKILL)
    with pytest.raises(RenderingError, match="ended with status -9"):
        await renderer.render(HELLO, {"word": ""})
    assert await renderer.render(HELLO, {"word": "again"}) == "again"


async def test_nothing_is_left_when_the_host_dies_in_a_rendering(renderer: Renderer) -> None:
    """The alarm is the process's own: nobody has to be there to end it."""
    process = await renderer._start()
    assert process.stdin is not None
    job = b'["' + ENDLESS.encode() + b'", {}]'
    process.stdin.write(len(job).to_bytes(8, "big") + job)
    process.stdin.close()
    started = time.monotonic()
    assert await asyncio.wait_for(process.wait(), 30) == -signal.SIGALRM
    assert time.monotonic() - started >= 0.9


async def test_text_of_all_kinds_comes_through() -> None:
    renderer = Renderer(limit_s=60)
    for word in ("", "é🙂\ud800\n\0", "x" * 10_000_000):
        assert await renderer.render(HELLO, {"word": word}) == word
    await renderer.close()
