"""Thinking told from content, and structured output in two passes on a scripted server
(docs/internals/wire.md, 8.4).
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from scripts.tools.host.lib import (
    F_SECOND,
    G_PRIME,
    Client,
    E,
    F,
    G,
    Generation,
    OutputScanner,
    Part,
    Request,
    Thinking,
    parts,
)
from scripts.tools.host.lib.output import EVERY_LINE, Rule

SCHEMA = {"type": "object"}
THINKING = Thinking(lambda thought: f"again {thought}")
FINAL = {"Done": True, "PromptEvalCount": 7, "PromptEvalDuration": 11, "EvalCount": 5, "EvalDuration": 13}


class Scripted:
    """Answers `think` with thinking and endless content, anything else with a short text; knows who went away."""

    def __init__(self) -> None:
        self.bodies: list[Mapping[str, object]] = []
        self.gone = asyncio.Event()
        app = web.Application()
        app.add_routes([web.post("/completion", self.completion)])
        self.server = TestServer(app)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        response = web.StreamResponse()
        await response.prepare(request)
        lines: list[object] = [{"Content": '{"a":'}, {"Content": "1}"}, FINAL]
        if body["Prompt"] == "think":
            counters = {"PromptEvalCount": 3, "PromptEvalCachedCount": 2, "PromptEvalDuration": 17, "EvalDuration": 19}
            texts = ["<think>", "a", "b</th", "ink>", "free"]
            lines = [{"Content": text, "EvalCount": at + 1, **counters} for at, text in enumerate(texts)]
        for line in lines:
            await response.write(json.dumps(line).encode() + b"\n")
        try:
            while body["Prompt"] == "think":
                await response.write(b'{"Content":"x"}\n')
                await asyncio.sleep(0.005)
        finally:
            if body["Prompt"] == "think":
                self.gone.set()
        return response

    async def ask(self, generation: Generation, prompt: str = "think", *, rule: Rule = EVERY_LINE) -> list[Part]:
        assert self.server.port is not None
        output = OutputScanner(rule)
        output.feed(b"level=INFO msg=ready\n")
        async with (
            Client(self.server.port, generation, output) as client,
            aclosing(parts(client, Request(prompt), THINKING, user_format=SCHEMA)) as answer,
        ):
            return [part async for part in answer]


@pytest.fixture
async def scripted() -> AsyncIterator[Scripted]:
    scripted = Scripted()
    await scripted.server.start_server()
    yield scripted
    await scripted.server.close()


@pytest.mark.parametrize("generation", [E, F, F_SECOND, G_PRIME], ids=lambda generation: generation.letter)
async def test_thinking_runs_free_and_the_content_is_asked_for_again(
    generation: Generation, scripted: Scripted
) -> None:
    answer = await scripted.ask(generation)
    await asyncio.wait_for(scripted.gone.wait(), 30)
    assert "".join(part.thinking for part in answer) == "ab"
    assert "".join(part.content for part in answer) == '{"a":1}', "nothing of the free content"
    first, second = scripted.bodies
    assert second["Prompt"] == "again ab"
    assert first.get("Format") is None
    if "Format" in generation.request_keys:
        tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}
        assert second["Format"] == tag
    assert all(not part.answer.eval_count for part in answer[:-1])
    final = answer[-1].answer
    if "IncludeIntermediateMetrics" in generation.request_keys:
        assert (first["IncludeIntermediateMetrics"], second["IncludeIntermediateMetrics"]) == (True, False)
        assert (final.prompt_eval_count, final.prompt_eval_cached_count, final.prompt_eval_duration) == (3, 2, 17)
        assert (final.eval_count, final.eval_duration) == (5 + 5, 19 + 11 + 13)
    else:
        assert (final.prompt_eval_count, final.eval_count, final.eval_duration) == (7, 5, 13)


async def test_the_newest_generation_asks_once_with_free_text_in_the_grammar(scripted: Scripted) -> None:
    await scripted.ask(G, "plain")
    (body,) = scripted.bodies
    assert '"any_text"' in json.dumps(body["Format"])
