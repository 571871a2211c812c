"""The page before the real process: a tiny model with random weights, which answers for as long as it may."""

import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from scripts.tools.conformance.this_runner import RUNNER
from scripts.tools.host.lib import Client, F, Process, Request, spawn
from scripts.tools.models.checkpoints import write_checkpoint
from scripts.tools.models.store import write_store
from tests.process.page.conftest import Look

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = "random:latest"
SHARED = "All that both of them share comes first. "
SECRET = "zebra"
LONG = {"num_predict": 60_000}
Spawn = Callable[..., Process]


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    model = write_checkpoint(directory / "random", "llama", overrides={"max_position_embeddings": 65536})
    write_store(directory / "store", MODEL, model)
    return directory / "store"


@pytest.fixture
def start(models_dir: Path) -> Iterator[Spawn]:
    """Spawns a runner, ready; ended with the test."""
    processes: list[Process] = []

    def start(*arguments: str, port: int | None = None) -> Process:
        process = spawn(RUNNER, MODEL, models_dir=models_dir, generation=F, port=port, arguments=arguments)
        processes.append(process)
        process.wait_ready(60)
        return process

    yield start
    for process in processes:
        process.kill()


def url(process: Process) -> str:
    return f"http://127.0.0.1:{process.port}/"


async def complete(process: Process, prompt: str) -> None:
    async with Client.of(process) as client:
        await client.complete(Request(prompt, {"num_predict": 8}))


@asynccontextmanager
async def answering(process: Process, prompt: str) -> AsyncIterator[None]:
    """While a long answer is written."""
    async with Client.of(process) as client, client.stream(Request(prompt, LONG)) as stream:
        async for _ in stream:
            yield
            return


async def test_a_real_trie_is_drawn_with_its_two_branches(start: Spawn, look: Look) -> None:
    process = start()
    view = await look(url(process))
    assert await view.text("#model") == MODEL
    for prompt in (f"{SHARED}Then one goes left.", f"{SHARED}And the other goes right."):
        await complete(process, prompt)
    await view.until_true("document.querySelectorAll('.edge').length >= 3")
    levels = await view.page.evaluate("[...document.querySelectorAll('.edge')].map(each => each.ariaLevel)")
    assert levels.count("1") == 1
    assert levels.count("2") == 2
    await view.until("#totals", "Answered2")


async def test_a_real_generation_is_followed(start: Spawn, look: Look) -> None:
    process = start()
    await complete(process, SHARED)
    view = await look(url(process))
    async with answering(process, f"{SHARED}Go on."):
        await view.until("#requests li", "answering")
        written = "parseInt(document.querySelector('#requests .foot :last-child').textContent.replaceAll(',', ''))"
        first = await view.number(written)
        await view.until_true(f"{written} > {first}")
        await view.until_true("document.querySelectorAll('.edge.used').length > 0")
    await view.until("#requests-none", "No request is running.")
    await view.until("#totals", "Cancelled1")


async def test_a_real_end_and_return(start: Spawn, look: Look) -> None:
    process = start()
    await complete(process, SHARED)
    view = await look(url(process))
    await view.page.locator(".edge").first.wait_for()
    view.loses = True
    process.send_signal(signal.SIGINT)
    await view.until("#ended", "The runner has ended")
    assert await view.page.locator(".edge").count() > 0, "the last state stays"
    assert process.wait(5) is not None
    start(port=process.port)
    await view.until("#state-word", "live")
    await view.until("#picture-none", "The cache is empty")
    assert await view.page.locator(".edge").count() == 0


@pytest.mark.parametrize("inspect", [False, True])
async def test_text_of_prompts_is_shown_only_on_request(inspect: bool, start: Spawn, look: Look) -> None:
    process = start(*(["--inspect-text"] if inspect else []))
    view = await look(url(process))
    prompt = f"{SECRET} {SHARED}"
    async with answering(process, prompt):
        await view.until("#requests li", "answering")
    await view.page.locator(".edge").first.click()
    await view.until("#node", "Position")
    page = await view.page.evaluate("document.documentElement.outerHTML")
    async with Client.of(process) as client:
        answers = [(await client.send("GET", path)).text for path in ("/v1/stats", "/v1/cache", "/metrics")]
    assert [SECRET in text for text in (page, *answers)] == [inspect, False, inspect, False]
