"""Ollama's interface over a host whose runner is a stand-in: thinking, formats, errors, who shares a runner."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from scripts.tools.host import go_json
from scripts.tools.host.api import Api
from scripts.tools.host.lib import G_PRIME, Generation, Host
from scripts.tools.host.lib.golang import read_json
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

    async def wire(self, count: int) -> list[dict[str, object]]:
        """Returns the requests that the runner received, with their keys in lower case, once there are `count`: its
        output is read by a thread, which an answer may overtake."""
        output = self.host.loaded[0].process.output
        while len(lines := [line for line in output.lines if line.startswith("POST ")]) < count:
            await asyncio.sleep(0.001)
        return [json.loads(line.removeprefix("POST ")) for line in lines]


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
    assert (await opened.wire(3))[-1]["format"] is not None, "never in two passes"


async def test_a_format_behind_thinking_takes_two_requests(open_api: OpenApi) -> None:
    opened = await open_api(THINKS)
    _, lines = await opened.chat("say <think>ab</think>cd", format={"type": "object"})
    first, second = await opened.wire(2)
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


CHAT, TEXT, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
RED = "iVBORw0KGgo="
"""The first bytes of a PNG."""


def openai(content: object, **more: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


async def events(opened: Opened, path: str, body: object) -> list[object]:
    """Returns what the events of a stream hold: objects, and a text at the end."""
    async with opened.client.post(path, json=body) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        *lines, last = (await response.text()).split("\n\n")
    assert last == ""
    values = [line.removeprefix("data: ") for line in lines]
    return [*(json.loads(value) for value in values[:-1]), values[-1]]


async def test_a_chat_of_openai_is_one_of_ollama(open_api: OpenApi) -> None:
    opened = await open_api(THINKS)
    schema = {"type": "object"}
    wanted = {"stop": "x", "max_completion_tokens": 7, "seed": 3, "frequency_penalty": 0.5, "presence_penalty": -1}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body = openai("say ab", **wanted, response_format=form, reasoning_effort="none")
    status, (answer,) = await opened.post(CHAT, body)
    assert status == 200
    assert answer["choices"] == [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ab"}}
    ]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert (answer["object"], answer["model"]) == ("chat.completion", "m")
    (sent,) = await opened.wire(1)
    given = {"num_predict": 7, "seed": 3, "frequency_penalty": 0.5, "presence_penalty": -1, "stop": ["x"]}
    assert sent["options"] == sent["options"] | given | {"temperature": 1, "top_p": 1}  # type: ignore[operator]
    assert sent["format"] == {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    _, (thought,) = await opened.post(CHAT, openai("say <think>a</think>b"))
    (choice,) = thought["choices"]  # type: ignore[misc]
    assert choice["message"] == {"role": "assistant", "content": "b", "reasoning": "a"}  # type: ignore[has-type]


async def test_parts_of_a_message_are_its_lines_and_its_pictures(open_api: OpenApi) -> None:
    opened = await open_api()
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{RED}"}}
    parts = [picture, {"type": "text", "text": "say a"}, {"type": "text", "text": "b"}]
    assert (await opened.post(CHAT, openai(parts)))[0] == 400, "the stand-in knows no [img-0]say"
    (sent,) = await opened.wire(1)
    assert sent["prompt"] == "[img-0]say a\nb"
    assert sent["media"] == [{"data": RED, "id": 0, "Kind": "image"}]


async def test_a_stream_of_openai_ends_with_usage_and_done(open_api: OpenApi) -> None:
    opened = await open_api()
    wanted = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, end = await events(opened, CHAT, openai("say ab", **wanted))
    assert end == "[DONE]"
    assert [chunk["choices"] for chunk in chunks] == [  # type: ignore[index]
        *(
            [{"index": 0, "finish_reason": reason, "delta": {"role": "assistant", "content": text}}]
            for text, reason in (("a", None), ("b", None), ("", "stop"))
        ),
        [],
    ]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}  # type: ignore[index]
    assert chunks[-1]["usage"]["total_tokens"] == 5  # type: ignore[index]
    *texts, end = await events(opened, TEXT, {"model": "m", "prompt": "say ab", "stream": True})
    assert end == "[DONE]"
    assert [text["choices"][0]["text"] for text in texts] == ["a", "b", ""]  # type: ignore[index]
    assert {text["object"] for text in texts} == {"text_completion"}  # type: ignore[index]


async def test_a_client_of_openai_that_leaves_ends_the_work_and_a_runner_that_ends_is_an_error(
    open_api: OpenApi,
) -> None:
    opened = await open_api()
    async with opened.client.post(CHAT, json=openai("hold on", stream=True)) as response:
        await response.content.readline()
        response.close()
    (loaded,) = opened.host.loaded
    while not any(line.startswith("gone") for line in loaded.process.output.lines):
        await asyncio.sleep(0.01)
    while loaded.users:
        await asyncio.sleep(0.01)
    async with opened.client.post(CHAT, json=openai("hold on", stream=True)) as response:
        await response.content.readline()
        loaded.process.kill()
        *_, last, end = (await response.text()).split("\n\n")
    assert end == ""
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "api_error"


REFUSED = [
    (CHAT, openai("x", model="none"), 404, "model 'none' not found"),
    (CHAT, openai("x", tools=[{}]), 400, "tools: not supported by scripts/host; use your Ollama"),
    (CHAT, openai("x", n=2), 400, "n: only 1 is supported"),
    (CHAT, openai("x", stop=[1]), 400, "stop: a text or an array of texts is wanted"),
    (CHAT, openai("x", max_tokens="7"), 400, "max_tokens: a number is wanted"),
    (CHAT, openai("x", reasoning_effort="huge"), 400, "one of high, medium, low, none is wanted, not 'huge'"),
    (CHAT, openai("x", reasoning_effort="low"), 400, '"m" does not support thinking'),
    (CHAT, openai("x", response_format={"type": "xml"}), 400, "response_format: text, json_object, or"),
    (CHAT, openai("x", messages=[]), 400, "messages: an array of at least one message is wanted"),
    (CHAT, openai([{"type": "image_url", "image_url": "http://a/b.png"}]), 400, "only data: URLs in base64"),
    (CHAT, openai(None), 400, "messages: each has a role, and a content of text or parts"),
    (TEXT, {"model": "m", "prompt": ["a"]}, 400, "prompt: a string is wanted"),
    (TEXT, {"model": "m", "prompt": "x", "suffix": "y"}, 400, "suffix: not supported"),
    (CHAT, openai("x", temperature=1e39), 500, "json: unsupported value: +Inf"),
    (CHAT, openai("x", top_p=-1e39), 500, "json: unsupported value: -Inf"),
    ("/v1/embeddings", {"model": "none", "input": "x"}, 404, "model 'none' not found"),
]


async def test_refusals_have_the_form_of_openai(open_api: OpenApi) -> None:
    opened = await open_api()
    kinds = {400: "invalid_request_error", 404: "not_found_error", 500: "api_error"}
    for path, body, status, text in REFUSED:
        found, (answer,) = await opened.post(path, body)
        error = answer["error"]
        assert isinstance(error, dict), text
        assert (found, error) == (
            status,
            {"message": error["message"], "type": kinds[status], "param": None, "code": None},
        )
        assert text in error["message"]


async def test_a_guard_answers_in_the_form_of_openai_too(open_api: OpenApi) -> None:
    opened = await open_api()
    async with opened.client.post(CHAT, data=b"x", headers={"Origin": "null"}) as response:
        assert response.status == 403
        assert (await response.json())["error"]["message"] == "only programs on this machine may use this host"
    async with opened.client.post(CHAT, data=b"no gzip", headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"] == "the body is not encoded as its headers state"


async def test_a_body_that_takes_long_to_read_holds_up_nobody(
    open_api: OpenApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, going_on, parse = await open_api(), threading.Event(), read_json

    def held(raw: bytes) -> object:
        assert going_on.wait(60), "the loop goes on meanwhile"
        return parse(raw)

    monkeypatch.setattr(go_json, "read_json", held)
    slow = asyncio.create_task(opened.post(CHAT, openai("say a")))
    async with opened.client.get(MODELS) as response:
        assert response.status == 200
    going_on.set()
    assert (await slow)[0] == 200


async def test_models_are_listed_for_openai(open_api: OpenApi) -> None:
    opened = await open_api()
    async with opened.client.get(MODELS) as response:
        listed = await response.json()
    async with opened.client.get(f"{MODELS}/m") as response:
        one = await response.json()
    assert listed == {"object": "list", "data": [one]}
    assert [*one] == ["id", "object", "created", "owned_by"]
    assert (one["id"], one["owned_by"]) == ("m:latest", "library")
