"""The suite never waits for ever, even if a runner or a request does."""

import asyncio
from contextlib import suppress

import pytest

from scripts.tools.conformance.assertions import gone
from tests.tools.conformance.proxy import Breakage, Proxy


async def test_a_request_that_goes_on_though_it_was_cancelled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.tools.conformance.assertions.GONE_S", 0.05)

    async def stubborn() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(30)
        await asyncio.sleep(30)

    task: asyncio.Task[object] = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        with pytest.raises(TimeoutError, match="goes on though it was cancelled"):
            await gone(task)
    await gone(task)


async def test_a_proxy_ends_though_what_it_passes_on_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.tools.conformance.proxy._CLOSE_S", 0.05)
    left: asyncio.Task[bytes] = asyncio.create_task(asyncio.sleep(30, b""))
    async with asyncio.timeout(10), Proxy(1, Breakage()) as proxy:
        proxy._left.add(left)
    with pytest.raises(asyncio.CancelledError):
        await left
