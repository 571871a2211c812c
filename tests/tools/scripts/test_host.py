"""`scripts/host` without a runner: models, chats, requests, the command line, and templates that go too far."""

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from scripts.tools.host.go_json import (
    RefusedError,
    dumps,
    keep_alive_of,
    options_of,
    read_body,
    timestamp,
    top_logprobs_of,
)
from scripts.tools.host.lib import A, F
from scripts.tools.host.main import listen, parse
from scripts.tools.host.models import Catalog, Model
from scripts.tools.host.template import ChatTemplate, Renderer, RenderingError
from scripts.tools.models.store import write_store
from tests import ROOT

WEIGHTS = ROOT / "scripts" / "demo_model"
CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("store")
    for name in ("demo:latest", "team/demo:small", "localhost:5000/team/demo:latest"):
        write_store(models, name, WEIGHTS)
    (models / "manifests" / "registry.ollama.ai" / "library" / "demo" / "broken").write_text("{")
    return models


def model_with(tmp_path: Path, **files: object) -> Model:
    for name, value in files.items():
        path = tmp_path / name.replace("__", ".")
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    model = Catalog(tmp_path / "none", tmp_path).find(str(tmp_path))
    assert model is not None
    return model


@pytest.mark.parametrize("name", ["demo", "demo:latest", "library/demo", "DEMO", "team/demo:small"])
def test_a_name_of_the_store_is_found_in_each_of_its_forms(name: str, store: Path) -> None:
    model = Catalog(store).find(name)
    assert model is not None
    assert model.name in ("demo:latest", "team/demo:small")
    assert model.argument == model.name
    assert re.fullmatch("[0-9a-f]{64}", model.digest)
    assert model.json("config.json")["model_type"] == "llama"
    assert model.details["format"] == "safetensors"


@pytest.mark.parametrize("name", ["nope", "demo:other", "demo:broken", "../demo", "a/b/c/d", ":", ""])
def test_anything_else_is_not_found(name: str, store: Path) -> None:
    assert Catalog(store).find(name) is None


def test_a_directory_is_a_model_of_its_name(store: Path) -> None:
    catalog = Catalog(store, WEIGHTS)
    model = catalog.find("demo_model")
    assert model is not None
    assert model is catalog.find("demo_model:latest") is catalog.find(str(WEIGHTS.resolve()))
    assert model is catalog.find("Demo_Model")
    assert model.argument == str(WEIGHTS.resolve())
    assert catalog.all()[0] is model
    assert catalog.find("demo") is not None, "the store is still there"


@pytest.fixture
async def renderer() -> AsyncIterator[Renderer]:
    renderer = Renderer(limit_s=2)
    yield renderer
    await renderer.close()


async def test_a_template_is_found_in_each_of_its_places(renderer: Renderer, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    model = model_with(tmp_path, tokenizer_config__json={"chat_template": named})
    assert await ChatTemplate(model, renderer).render(CHAT) == "plain"
    assert await ChatTemplate(model, renderer).render(CHAT, [{"type": "function"}]) == "tools"
    assert ChatTemplate(model, renderer).knows_tools
    model = model_with(tmp_path, chat_template__jinja="from a file")
    assert await ChatTemplate(model, renderer).render(CHAT) == "from a file"


async def test_a_template_gets_what_transformers_gives_it(renderer: Renderer, tmp_path: Path) -> None:
    source = """{%- for message in messages %}
    {% generation %}{{ message | tojson }}{% endgeneration %}
    {% break %}
{%- endfor %}{{ bos_token }}{{ eos_token }}{{ strftime_now('%Y') | length }}{{ tools is none }}{{ enable_thinking }}"""
    config = {"chat_template": source, "bos_token": "<b>", "eos_token": {"content": "<e>"}, "add_bos_token": False}
    template = ChatTemplate(model_with(tmp_path, tokenizer_config__json=config), renderer)
    text = await template.render([{"role": "user", "content": "<é>"}], think=False)
    assert text == '{"role": "user", "content": "<é>"}<b><e>4TrueFalse'


@pytest.mark.parametrize("source", ["{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}", "{{ 1 + 'a' }}", "{%"])
async def test_a_template_that_refuses_or_reaches_out_is_an_error(
    renderer: Renderer, source: str, tmp_path: Path
) -> None:
    template = ChatTemplate(model_with(tmp_path, tokenizer_config__json={"chat_template": source}), renderer)
    with pytest.raises(RenderingError):
        await template.render(CHAT)


@pytest.mark.parametrize(("adds", "prompt"), [(True, "Hello"), (False, "<b>Hello")])
async def test_a_bos_is_written_once(renderer: Renderer, adds: bool, prompt: str, tmp_path: Path) -> None:
    config = {"chat_template": "<b>{{ messages[0].content }}", "bos_token": "<b>", "add_bos_token": adds}
    template = ChatTemplate(model_with(tmp_path, tokenizer_config__json=config), renderer)
    assert await template.render(CHAT) == prompt


async def test_without_a_template_the_roles_are_words(renderer: Renderer, tmp_path: Path) -> None:
    template = ChatTemplate(model_with(tmp_path, tokenizer_config__json={}), renderer)
    assert template.source is None
    assert await template.render(CHAT) == "user: Hello\nassistant:"


def test_options_stand_on_the_hosts_defaults() -> None:
    body = {"options": {"temperature": 1, "top_k": 5.0, "seed": None, "stop": ["x"], "huh": 1}}
    options = options_of(body, F)
    assert {**F.default_options, "temperature": 1.0, "top_k": 5, "stop": ["x"], "huh": 1.0} == options
    assert type(options["top_k"]) is int
    assert "num_ctx" not in options_of({}, A)
    for key, value in (("top_k", "5"), ("temperature", True), ("stop", "x"), ("stop", [1]), ("use_mmap", 1)):
        with pytest.raises(RefusedError, match=f'option "{key}" must be of type') as refusal:
            options_of({"options": {key: value}}, F)
        assert refusal.value.status == 500


def test_requests_that_are_none_are_refused() -> None:
    numbers = (b"NaN", b"-Infinity", b"1e999", b"-1e999", b"1" + b"0" * 400)
    for raw in (b"", b"  ", b"{", b"[]", b"5", b"[" * 10**5, *(b'{"a":[%s]}' % number for number in numbers)):
        with pytest.raises(RefusedError) as refusal:
            read_body(raw)
        assert refusal.value.status == 400
    for value in ("soon", ["5m"]):
        with pytest.raises(RefusedError):
            keep_alive_of({"keep_alive": value})
    for count in (-1, 21, "3"):
        with pytest.raises(RefusedError, match="between 0 and 20"):
            top_logprobs_of({"top_logprobs": count})
    assert (keep_alive_of({}), keep_alive_of({"keep_alive": -1})) == (None, math.inf)


def test_what_is_no_unicode_in_a_request_becomes_the_replacement_character() -> None:
    raw = rb'{"a\ud800":["\udc00x",{"b":"\ud83d\ude00"}],"c":"' + b'\xff","d":[1,2.5,true,null]}'
    assert read_body(raw) == {
        "a\ufffd": ["\ufffdx", {"b": "\U0001f600"}],
        "c": "\ufffd",
        "d": [1, 2.5, True, None],
    }
    with pytest.raises(RefusedError, match="missing request body"):
        read_body(b" ")


def test_json_and_times_are_gos() -> None:
    assert dumps({"a": "<é&\u2028>"}) == '{"a":"\\u003cé\\u0026\\u2028\\u003e"}'
    assert timestamp(0) == "1970-01-01T00:00:00Z"
    assert timestamp(1.25) == "1970-01-01T00:00:01.25Z"
    for seconds in (math.inf, 1e12, 1e300):
        assert "2300" < timestamp(seconds) < "2500"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--generation", "Z"], "--generation"),
        (["--keep-alive", "soon"], "--keep-alive: "),
        (["--max-loaded", "0"], "--max-loaded: "),
        (["a", "b"], "unrecognized"),
        (["--port", "65536"], "--port: 0 to 65535"),
        (["--port", "-1"], "--port: 0 to 65535"),
        (["--runner", ""], "--runner: a command is wanted"),
        (["--runner", " "], "--runner: a command is wanted"),
        (["--runner", "'a"], "--runner: No closing quotation"),
    ],
)
def test_a_wrong_command_line_is_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parse(words)
    assert refused.value.code == 2
    assert text in capsys.readouterr().err


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_named_port_that_is_taken_ends_it_and_the_default_goes_on(
    taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=f"listen tcp 127.0.0.1:{taken}: Address already in use"):
        listen(taken)
    monkeypatch.setattr("scripts.tools.host.main.PORT", taken)
    with listen(None) as listener:
        assert taken < listener.getsockname()[1] < taken + 20


HELLO = "{{ word }}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{{ 'x' * 9000000000 }}"
LONG = "{{ 'x' * 20000000 }}"
DEEP = "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"
BUSY = "{{ 7 ** (2 ** 27) }}"
"""One operation, in which Python looks for no signal."""


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
async def test_a_template_that_goes_too_far_is_an_error_and_the_next_one_is_not(template: str, reason: str) -> None:
    renderer = Renderer(limit_s=1 if "1 s" in reason else 60)
    with pytest.raises(RenderingError, match=reason):
        await renderer.render(template, {})
    assert await renderer.render(HELLO, {"word": "hello"}) == "hello"
    await renderer.close()


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
