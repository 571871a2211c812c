"""Makes docs/page.png and docs/page-dark.png: the page before a real runner with the demo model, after some minutes of
conversations. `scripts/browser && python -m scripts.tools.docs.screenshots [SECONDS]`
"""

import asyncio
import random
import sys
from pathlib import Path
from time import monotonic

from playwright.async_api import Page, async_playwright

from scripts.tools import ROOT
from scripts.tools.conformance.this_runner import RUNNER
from scripts.tools.demo.questions import CONVERSATIONS, RELATIONS, SMALL_TALK, Turn, messages, render
from scripts.tools.demo.subjects import MODEL, demo_store
from scripts.tools.docs.browser import WANTED, chromium
from scripts.tools.host.lib import Client, G, Process, Request, spawn

DOCS = ROOT / "docs"
PICTURES = {"light": DOCS / "page.png", "dark": DOCS / "page-dark.png"}
WIDTH, HEIGHT = 1200, 900
USERS = 3
TURNS = 5
SECONDS = 420.0
PAUSE_S = 5.0
MOMENT_S = 1.5


async def user(client: Client, number: int, until: float) -> None:
    """Conversations one after the other: a system prompt of two, and now and then a question that others asked too."""
    chance = random.Random(number)
    while monotonic() < until:
        system = CONVERSATIONS[chance.randrange(2)].system
        turns: list[Turn] = []
        for _ in range(chance.randint(2, TURNS)):
            relation = chance.choice(RELATIONS)
            about = relation.question.format(person=chance.choice(("Otto", "Emma", "Hugo")))
            question = chance.choice((*SMALL_TALK, about, about))
            options = {"num_predict": 120, "temperature": 0.8, "seed": chance.randint(1, 5)}
            completion = await client.complete(Request(render(messages(turns, question, system)), options))
            turns.append(Turn(question, completion.text))
            await asyncio.sleep(chance.random() * PAUSE_S)


async def shoot(client: Client, page: Page, path: Path) -> None:
    """While long answers are written and a long prompt is read; the second edge is chosen."""
    answers = [Request(f"The river, number {number}", {"num_predict": 1500 * number}) for number in (1, 2)]
    text = f"{path.stem} {' '.join(SMALL_TALK.values()) * 16}"
    prompt = Request(f"<|user|>{text}<|end|><|assistant|>", {"num_predict": 200})
    await page.locator("#picture .edge").nth(1).click()
    busy = [asyncio.ensure_future(client.complete(request)) for request in answers]
    await asyncio.sleep(MOMENT_S)
    busy.append(asyncio.ensure_future(client.complete(prompt)))
    await page.locator("#requests [data-phase=prefill]").wait_for()
    await asyncio.sleep(MOMENT_S)
    await page.screenshot(path=path, full_page=True)
    for each in busy:
        each.cancel()
    await asyncio.wait(busy)


async def look(process: Process, seconds: float) -> None:
    until = monotonic() + seconds
    browser_path = chromium()
    if browser_path is None:
        sys.exit(WANTED)
    async with async_playwright() as playwright, Client.of(process) as client:
        browser = await playwright.chromium.launch(executable_path=browser_path)
        pages = {}
        for scheme in ("light", "dark"):
            context = await browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
            pages[scheme] = await context.new_page()
            await pages[scheme].goto(f"http://127.0.0.1:{process.port}/")
        async with asyncio.TaskGroup() as everybody:
            for number in range(USERS):
                everybody.create_task(user(client, number, until + 5))
            await asyncio.sleep(seconds)
            for scheme, page in pages.items():
                await shoot(client, page, PICTURES[scheme])
        await browser.close()


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    arguments = ["--inspect-text", "--cache-memory", "128MiB"]
    with (
        demo_store() as models,
        spawn(RUNNER, MODEL, models_dir=models, generation=G, arguments=arguments) as process,
    ):
        process.wait_ready()
        asyncio.run(look(process, seconds))
    for path in PICTURES.values():
        print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
