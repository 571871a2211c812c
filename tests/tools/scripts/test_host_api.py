"""Ollama's interface over a host whose runner is a stand-in: thinking, formats, errors, who shares a runner."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from scripts.tools.host.api import Api
from scripts.tools.host.lib import G_PRIME, Generation, Host
from scripts.tools.host.models import Catalog
from scripts.tools.host.template import Renderer
from tests.tools.host.stand_in import STAND_IN

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
THINKS = TEMPLATE + "{# <think></think> #}"
OpenApi = Callable[..., Awaitable["Opened"]]


class Opened:
    """The interface, a client of it, and the host behind it."""

    def __init__(self, host: Host, client: TestClient) -> None:  # type: ignore[type-arg]  # its defaults
        self.host = host
        self.client = client

    async def chat(self, content: str, **more: object) -> tuple[int, list[dict[str, object]]]:
        messages = [{"role": "user", "content": content}]
        return await self.post("/api/chat", {"model": "m", "messages": messages, **more})

    async def post(self, path: str, body: object) -> tuple[int, list[dict[str, object]]]:
        async with self.client.post(path, json=body) as response:
            return response.status, [json.loads(line) for line in (await response.text()).splitlines()]

    @property
    def wire(self) -> list[dict[str, object]]:
        """The requests that the runner received, with their keys in lower case."""
        lines = self.host.loaded[0].process.output.lines
        return [json.loads(line.removeprefix("POST ")) for line in lines if line.startswith("POST ")]


@pytest.fixture
async def open_api(tmp_path: Path) -> AsyncIterator[OpenApi]:
    opened: list[Opened] = []

    async def open_one(template: str = TEMPLATE, generation: Generation = G_PRIME, **arguments: object) -> Opened:
        (tmp_path / "m").mkdir(exist_ok=True)
        (tmp_path / "m" / "chat_template.jinja").write_text(template)
        host = Host(STAND_IN, generation=generation, **arguments)  # type: ignore[arg-type]  # as Host's own
        client = TestClient(TestServer(Api(host, Catalog(tmp_path, tmp_path / "m")).app()))
        await client.start_server()
        opened.append(Opened(host, client))
        return opened[-1]

    yield open_one
    for one in opened:
        await one.host.close()
        await one.client.close()


def joined(lines: list[dict[str, object]], key: str) -> str:
    messages = [line["message"] for line in lines]
    return "".join(message.get(key, "") for message in messages if isinstance(message, dict))


async def test_thinking_is_told_from_content_for_a_template_that_knows_it(open_api: OpenApi) -> None:
    opened = await open_api(THINKS)
    status, lines = await opened.chat("say <think>a b</think> cd")
    assert status == 200
    assert (joined(lines, "thinking"), joined(lines, "content")) == ("a b", "cd")
    _, lines = await opened.chat("say <think>a b</think> cd", think=False)
    assert (joined(lines, "thinking"), joined(lines, "content")) == ("", "<think>a b</think> cd")
    _, (line,) = await opened.post(
        "/api/generate", {"model": "m", "prompt": "say <think>a</think>b", "stream": False, "format": "json"}
    )
    assert (line["thinking"], line["response"]) == ("a", "b")
    assert opened.wire[-1]["format"] is not None, "never in two passes"


async def test_a_format_behind_thinking_takes_two_requests(open_api: OpenApi) -> None:
    opened = await open_api(THINKS)
    _, lines = await opened.chat("say <think>ab</think>cd", format={"type": "object"})
    first, second = opened.wire
    assert (first["format"], first["includeintermediatemetrics"]) == (None, True)
    assert second["prompt"] == "say <think>ab</think>cd<think>\nab\n</think>\n\n"
    assert second["format"] == {
        "type": "structural_tag",
        "format": {"type": "json_schema", "json_schema": {"type": "object"}},
    }
    assert joined(lines, "thinking") == "ab"
    assert lines[-1]["eval_count"] == 1 + 3


async def test_a_template_that_does_not_end_holds_up_nobody(open_api: OpenApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.tools.host.shelf.Renderer", partial(Renderer, 3))
    opened = await open_api("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    chat = asyncio.create_task(opened.chat("say x"))
    for _ in range(3):
        status, (line,) = await opened.post(
            "/api/generate", {"model": "m", "prompt": "say x", "raw": True, "stream": False}
        )
        assert (status, line["response"]) == (200, "x")
    assert not chat.done()
    assert await chat == (500, [{"error": "the chat template did not end within 3 s"}])


LOCAL: tuple[dict[str, str], ...] = (
    {},
    {"Origin": "http://localhost:3000"},
    {"Host": "localhost"},
    {"Host": "[::1]:11434"},
)
FOREIGN = (
    {"Host": "evil.example"},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Host": "127.0.0.1.evil.example"},
    {"Sec-Fetch-Site": "cross-site"},
)


@pytest.mark.parametrize("headers", [*LOCAL, *FOREIGN], ids=str)
async def test_a_web_page_gets_no_answer(open_api: OpenApi, headers: dict[str, str]) -> None:
    opened = await open_api()
    body = {"model": "m", "messages": [{"role": "user", "content": "say x"}], "stream": False}
    for request in (
        opened.client.get("/api/tags", headers=headers),
        opened.client.get("/nowhere", headers=headers),
        opened.client.post("/api/chat", json=body, headers=headers),
    ):
        async with request as response:
            if headers in LOCAL:
                assert response.status == (404 if response.url.path == "/nowhere" else 200)
            else:
                assert response.status == 403
                assert await response.json() == {"error": "only programs on this machine may use this host"}
    assert bool(opened.host.loaded) == (headers in LOCAL), "nothing was started"


async def test_pictures_are_counted_over_the_whole_conversation(open_api: OpenApi) -> None:
    opened = await open_api("say {% for message in messages %}{{ message.content }};{% endfor %}")
    png, jpeg, wave = (base64.b64encode(data).decode() for data in (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"ID3"))
    messages = [
        {"role": "user", "content": "look", "images": [png, jpeg]},
        {"role": "assistant", "content": "nice"},
        {"role": "user", "content": "hear [img]!", "images": [wave]},
    ]
    status, _ = await opened.post("/api/chat", {"model": "m", "messages": messages, "stream": False})
    assert status == 200
    async with asyncio.timeout(10):
        while not opened.wire:  # a thread reads what the runner says
            await asyncio.sleep(0.01)
    (wire,) = opened.wire
    assert wire["prompt"] == "say [img-0][img-1]look;nice;hear [img-2]!;"
    assert wire["media"] == [
        {"data": png, "id": 0, "Kind": "image"},
        {"data": jpeg, "id": 1, "Kind": "image"},
        {"data": wave, "id": 2, "Kind": "audio"},
    ]
