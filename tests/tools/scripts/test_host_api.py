"""Ollama's interface over a host whose runner is a stand-in: thinking, formats, errors, who shares a runner."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from scripts.tools.host.api import Api
from scripts.tools.host.lib import G_PRIME, Generation, Host
from scripts.tools.host.models import Catalog
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
