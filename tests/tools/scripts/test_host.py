"""`scripts/host` without a runner: models, chats, requests, and templates that go too far."""

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

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


HELLO = "{{ word }}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{{ 'x' * 9000000000 }}"
LONG = "{{ 'x' * 20000000 }}"
DEEP = "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"
BUSY = "{{ 7 ** (2 ** 27) }}"
"""One operation, in which Python looks for no signal."""


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
