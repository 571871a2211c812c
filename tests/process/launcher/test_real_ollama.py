"""Real releases of Ollama with our runner, through their own API. Each is named in the environment:

OLLAMA_BINARIES=/path/to/ollama:/path/to/another scripts/test tests/process/launcher/test_real_ollama.py
"""

import asyncio
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from scripts.tools.demo.questions import CONVERSATIONS, END, SMALL_TALK
from scripts.tools.demo.subjects import MODEL, demo_store
from scripts.tools.host.lib import free_port
from scripts.tools.models.store import Store, manifest_path
from tests.process.launcher.standin import COMMAND, eventually_gone

BINARIES = [binary for binary in os.environ.get("OLLAMA_BINARIES", "").split(":") if binary]
TEMPLATE = f"{{{{- range .Messages }}}}<|{{{{ .Role }}}}|>{{{{ .Content }}}}{END}{{{{ end }}}}<|assistant|>"
"""The template by which a host renders a chat for the demo model."""
STORY = "Tell me a story."
WAIT_S = 120.0

if not BINARIES:
    reason = (
        "needs a real Ollama: OLLAMA_BINARIES=/path/to/ollama scripts/test tests/process/launcher/test_real_ollama.py"
    )
    pytest.skip(reason, allow_module_level=True)


class Ollama:
    """A running server. Its log, with its runners' lines in it, is kept in a file."""

    def __init__(self, popen: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.popen = popen
        self.url = url
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def runners(self) -> dict[int, str]:
        """Its children that run the model: process ids and command lines."""
        listed = subprocess.run(["ps", "-axwwo", "pid=,ppid=,args="], check=True, capture_output=True, text=True).stdout
        rows = [line.split(None, 2) for line in listed.splitlines()]
        return {int(row[0]): row[2] for row in rows if int(row[1]) == self.popen.pid and f"--model {MODEL} " in row[2]}

    def wait_ready(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/api/version", timeout=5).close()
            except (urllib.error.URLError, ConnectionError) as error:
                if self.popen.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(self.log) from error
                time.sleep(0.05)
            else:
                return

    @asynccontextmanager
    async def stream(self, path: str, body: dict[str, object]) -> AsyncIterator[AsyncIterator[dict[str, object]]]:
        """Yields the objects of a running answer, one a line; leaving the block closes the connection."""
        timeout = aiohttp.ClientTimeout(total=WAIT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            response = await session.post(self.url + path, json={"model": "demo", **body})
            assert response.status == 200
            yield (json.loads(line) async for line in response.content if line.strip())

    async def chat(self, *messages: str, system: str | None = None) -> str:
        """Returns the answer to the messages of user and assistant in turns, greedily."""
        roles = ("user", "assistant")
        listed = [{"role": roles[index % 2], "content": content} for index, content in enumerate(messages)]
        if system is not None:
            listed.insert(0, {"role": "system", "content": system})
        async with self.stream("/api/chat", {"messages": listed, "options": {"temperature": 0}}) as answer:
            return "".join([text_of(each) async for each in answer])


def text_of(item: dict[str, object]) -> str:
    """Returns the text in one object of a chat."""
    message = item["message"]
    assert isinstance(message, dict)
    return str(message["content"])


@contextmanager
def serving(binary: str, models: Path, place: Path) -> Iterator[Ollama]:
    """Starts a real Ollama with our runner."""
    address = f"127.0.0.1:{free_port()}"
    own = {"HOME": str(place), "XDG_CACHE_HOME": str(place / "cache"), "OLLAMA_MODELS": str(models)}
    with (place / "log").open("wb") as log:
        environment = {**os.environ, **own, "OLLAMA_HOST": address}
        popen = subprocess.Popen([*COMMAND, binary], env=environment, cwd=place, stdout=log, stderr=log)
    ollama = Ollama(popen, f"http://{address}", place / "log")
    try:
        ollama.wait_ready()
        yield ollama
    finally:
        popen.terminate()
        popen.wait(WAIT_S)


@pytest.fixture(scope="module")
def models() -> Iterator[Path]:
    """The store: the demo model with a chat template."""
    with demo_store() as models:
        store = Store(models, manifest_path(models, MODEL))
        layer = store.add_blob(TEMPLATE.encode(), "application/vnd.ollama.image.template")
        store.manifest = {**store.manifest, "layers": [*store.layers, layer]}
        yield models


@pytest.fixture(scope="module", params=BINARIES, ids=lambda binary: Path(binary).name)
def ollama(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ollama]:
    with serving(request.param, models, tmp_path_factory.mktemp("ollama")) as ollama:
        yield ollama


def is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


async def eventually(holds: Callable[[], bool]) -> bool:
    """Returns True if it comes to hold within a minute."""
    for _ in range(600):
        if holds():
            return True
        await asyncio.sleep(0.1)
    return False


async def test_a_chat_of_several_turns(ollama: Ollama) -> None:
    for conversation in CONVERSATIONS[1:3]:
        said: list[str] = []
        for turn in conversation.turns:
            assert await ollama.chat(*said, turn.user, system=conversation.system) == turn.answer
            said += [turn.user, turn.answer]


async def test_unloading_and_loading_again(ollama: Ollama) -> None:
    await ollama.chat("Hello")
    (runner,) = ollama.runners
    assert " -I -m runner runner " in ollama.runners[runner], "it is ours"
    async with ollama.stream("/api/generate", {"keep_alive": 0}) as answer:
        assert [each["done_reason"] async for each in answer] == ["unload"]
    assert await eventually(lambda: not ollama.runners)
    assert await ollama.chat("Hello") == SMALL_TALK["Hello"]
    (other,) = ollama.runners
    assert other != runner


async def test_ending_it_leaves_nothing_behind(
    request: pytest.FixtureRequest, models: Path, tmp_path: Path, ollama: Ollama
) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        place = tmp_path / number.name
        place.mkdir()
        with serving(request.node.callspec.params["ollama"], models, place) as another:
            assert await another.chat("Hello") == SMALL_TALK["Hello"]
            (runner,) = another.runners
            (directory,) = (place / "cache" / "ollama-mlx-runner").iterdir()
            another.popen.send_signal(number)
            assert another.popen.wait(60) == (0 if number == signal.SIGINT else -number)
            assert await eventually(partial(is_gone, runner))
            assert eventually_gone(directory)


async def test_no_errors_were_logged(ollama: Ollama) -> None:
    """Stands last: the log of all tests before."""
    assert "Traceback" not in ollama.log
    assert "panic" not in ollama.log
