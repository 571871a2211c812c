"""A real Ollama, started by `mlx-runner ollama serve` on a store with the demo model, and what its API answers."""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import aiohttp

from scripts.tools.demo.questions import END
from scripts.tools.demo.subjects import MODEL
from scripts.tools.host.lib import free_port
from scripts.tools.models.store import MANIFEST, Store, manifest_path
from tests.process.launcher.standin import COMMAND

TEMPLATE = f"{{{{- range .Messages }}}}<|{{{{ .Role }}}}|>{{{{ .Content }}}}{END}{{{{ end }}}}<|assistant|>"
"""The template by which a host renders a chat for the demo model."""
WAIT_S = 120.0
JsonObject = dict[str, object]


class Answer(NamedTuple):
    """An HTTP status and the JSON objects of the body: one, or one a line."""

    status: int
    objects: list[JsonObject]

    @property
    def last(self) -> JsonObject:
        return self.objects[-1]

    @property
    def text(self) -> str:
        """The answer's text, of a chat or of a completion."""
        return "".join(text_of(item) for item in self.objects)


def listed(item: JsonObject, key: str) -> list[dict[str, Any]]:
    """A list of objects in an object."""
    found = item[key]
    assert isinstance(found, list)
    return found


def text_of(item: Mapping[str, object]) -> str:
    """Returns the text in one object."""
    message = item.get("message")
    return str(message["content"] if isinstance(message, dict) else item.get("response", ""))


def add_template(models: Path) -> None:
    """Adds the template, which hosts need to render chats, as a layer of the model."""
    path = manifest_path(models, MODEL)
    store = Store(models, path)
    layer = store.add_blob(TEMPLATE.encode(), "application/vnd.ollama.image.template")
    assert store.manifest["mediaType"] == MANIFEST
    store.manifest = {**store.manifest, "layers": [*store.layers, layer]}


class Ollama:
    """A running server. Its log, with its runners' lines in it, is kept in a file."""

    def __init__(self, command: Sequence[str], models: Path, place: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = {
            **os.environ,
            "HOME": str(place),
            "XDG_CACHE_HOME": str(place / "cache"),
            "OLLAMA_MODELS": str(models),
            "OLLAMA_HOST": f"127.0.0.1:{self.port}",
        }
        self._log = place / "log"
        with self._log.open("wb") as log:
            self.popen = subprocess.Popen(command, env=self.environment, cwd=place, stdout=log, stderr=log)
        self.version = self._wait_version()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def runners(self) -> dict[int, str]:
        """Its children that run the model: process ids and command lines."""
        listed = subprocess.run(["ps", "-axwwo", "pid=,ppid=,args="], check=True, capture_output=True, text=True).stdout
        rows = [line.split(None, 2) for line in listed.splitlines()]
        return {int(row[0]): row[2] for row in rows if int(row[1]) == self.popen.pid and f"--model {MODEL} " in row[2]}

    def _wait_version(self) -> tuple[int, ...]:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/api/version", timeout=5) as response:
                    version = json.loads(response.read())["version"]
                return tuple(int(part) for part in version.split("-")[0].split("."))
            except (urllib.error.URLError, ConnectionError) as error:
                if self.popen.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(self.log) from error
                time.sleep(0.05)

    async def ask(self, path: str, body: Mapping[str, object] | None = None) -> Answer:
        """GET, or POST with a body, read to the end."""
        async with self.stream(path, body) as response:
            return Answer(response.status, [item async for item in lines(response)])

    async def chat(self, *messages: str, **more: object) -> Answer:
        """`/api/chat` with the messages of user and assistant in turns, greedy, without streaming."""
        return await self.ask("/api/chat", chat_body(*messages, **more))

    def stream(self, path: str, body: Mapping[str, object] | None = None) -> "_Sent":
        """A running answer, for `async with` and `lines`; leaving the block closes the connection."""
        return _Sent(self.url + path, body)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.popen.terminate()
        self.popen.wait(WAIT_S)


class _Sent:
    """One request with a connection of its own."""

    def __init__(self, url: str, body: Mapping[str, object] | None) -> None:
        self._url, self._body = url, body

    async def __aenter__(self) -> aiohttp.ClientResponse:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S))
        method = "GET" if self._body is None else "POST"
        return await self._session.request(method, self._url, json=self._body)

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()


async def lines(response: aiohttp.ClientResponse) -> AsyncIterator[JsonObject]:
    """The objects of a body."""
    async for line in response.content:
        if line.strip():
            yield json.loads(line)


def chat_body(*messages: str, **more: object) -> JsonObject:
    """Returns a body for `/api/chat`; the first message is the user's."""
    roles = ("user", "assistant")
    listed = [{"role": roles[index % 2], "content": content} for index, content in enumerate(messages)]
    return {"model": "demo", "messages": listed, "stream": False, "options": {"temperature": 0}} | more


def launched(binary: str) -> list[str]:
    """The command that starts a real Ollama with our runner."""
    return [*COMMAND, binary]
