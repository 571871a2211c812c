"""A headless Chromium, and the page in it before the stand-in for a runner."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.lib.page_stand_in import StandIn

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

WANTED = "no browser to look at the page with: run scripts/browser"
_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
NETWORK = "net::ERR_"
"""The browser's own console message when no server answers, whatever the page does."""


def chromium() -> str | None:
    """Returns the path of the browser that `CHROMIUM` names, or else of an installed one; None where there is none."""
    found = (shutil.which(name) for name in (os.environ.get("CHROMIUM", ""), *_NAMES))
    return next(filter(None, found), None)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> "AsyncIterator[Browser]":
    """One for all tests: each has a window of its own."""
    try:
        from playwright.async_api import async_playwright
    except ImportError:
        pytest.skip(WANTED)
    path = chromium()
    if path is None:
        pytest.skip(WANTED)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path)
        yield browser
        await browser.close()


class View:
    """A window of the browser, and what went on in it."""

    def __init__(self, page: "Page") -> None:
        self.page = page
        self.errors: list[str] = []
        self.asked: list[str] = []
        """The addresses of all requests."""
        self.loses = False
        """True if the runner ends before its window: the browser then writes that nobody answers."""
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else None)
        page.on("dialog", lambda dialog: self.errors.append(f"a dialog: {dialog.message}"))
        page.on("request", lambda request: self.asked.append(request.url))

    async def text(self, selector: str) -> str:
        """Of the first element that there is."""
        return str(await self.page.locator(selector).first.inner_text())

    async def until(self, selector: str, words: str) -> None:
        """Waits for words in an element."""
        await self.page.locator(selector, has_text=words).first.wait_for()

    async def until_true(self, expression: str) -> None:
        """Looks at every frame: Playwright's own way would need a page that lets text be run as a script."""
        async with asyncio.timeout(30):
            while not await self.page.evaluate(expression):
                await self.page.evaluate("() => new Promise(requestAnimationFrame)")

    async def number(self, expression: str) -> float:
        return float(await self.page.evaluate(expression))

    async def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height."""
        box = await self.page.locator(selector).first.bounding_box()
        assert box is not None, f"{selector} is not to be seen"
        return box["x"], box["y"], box["width"], box["height"]

    def check(self, url: str) -> None:
        """No error, and nothing asked of anybody but this one."""
        assert [line for line in self.errors if not (self.loses and NETWORK in line)] == []
        assert [other for other in self.asked if not other.startswith((url, "data:"))] == []


Look = Callable[..., Awaitable[View]]


@pytest_asyncio.fixture(loop_scope="session")
async def look(browser: "Browser") -> AsyncIterator[Look]:
    """Opens an address in a window of its own, and at the end demands that nothing went wrong there."""
    views: list[tuple[View, str]] = []

    async def look(url: str, width: int = 1240, height: int = 900, scheme: str = "light", state: str = "live") -> View:
        context = await browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        context.set_default_timeout(30_000)
        view = View(await context.new_page())
        views.append((view, url))
        await view.page.goto(url)
        await view.until("#state-word", state)
        return view

    yield look
    for view, url in views:
        with suppress(Exception):
            await view.page.context.close()
        view.check(url)


@pytest_asyncio.fixture(loop_scope="session")
async def stand_in(browser: "Browser") -> AsyncIterator[StandIn]:
    async with StandIn() as stand_in:
        yield stand_in
