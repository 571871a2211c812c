"""Ollama's interface over `scripts.tools.host.lib.Host`: the routes that people and the `ollama` program need."""

import re
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

import aiohttp
from aiohttp import web

from runner.server.routes import HEADERS, is_local
from scripts.tools.host.decisions import Decisions
from scripts.tools.host.embeddings import Embeddings
from scripts.tools.host.go_json import (
    Body,
    Job,
    RefusedError,
    Writer,
    flag_of,
    json_response,
    keep_alive_of,
    listed,
    marked,
    media_of,
    options_of,
    read_body,
    running,
    text_of,
    top_logprobs_of,
)
from scripts.tools.host.lib import (
    Host,
    Loaded,
    LoadError,
    Part,
    Request,
    StatusError,
    StreamError,
    Thinking,
    UndecodableError,
    parts,
    wire_format,
)
from scripts.tools.host.models import Catalog, Model
from scripts.tools.host.openai import ROUTES, OpenAi, error_of
from scripts.tools.host.shelf import Shelf
from scripts.tools.host.template import Message, RenderingError

_BODY_BYTES = 1 << 30


class Api:
    """The routes. `host` runs the models that `catalog` names."""

    def __init__(self, host: Host, catalog: Catalog) -> None:
        self._host = host
        self._shelf = Shelf(host, catalog)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_BODY_BYTES, middlewares=[_answer_refusals])
        app.on_cleanup.append(self._close)
        app.add_routes(
            [
                web.get("/", self._root),
                web.get("/api/version", self._version),
                web.get("/api/tags", self._tags),
                web.get("/api/ps", self._ps),
                web.post("/api/show", self._show),
                web.post("/api/generate", self._generate),
                web.post("/api/chat", self._chat),
                *Decisions(self._shelf).routes(),
                *Embeddings(self._shelf).routes(),
                *OpenAi(self._shelf, self._answer_chat, self._answer_prompt).routes(),
            ]
        )
        return app

    async def _close(self, _: web.Application) -> None:
        await self._shelf.renderer.close()

    async def load(self, model: Model) -> None:
        async with self._shelf.runner(model, {}):
            pass

    async def _root(self, _: web.Request) -> web.Response:
        return web.Response(text="Ollama is running")

    async def _version(self, _: web.Request) -> web.Response:
        """Returns the version of the newest host of this generation."""
        return json_response({"version": re.findall(r"v([0-9.]+)", self._host.generation.releases)[-1]})

    async def _tags(self, _: web.Request) -> web.Response:
        return json_response({"models": [listed(model) for model in self._shelf.catalog.all()]})

    async def _ps(self, _: web.Request) -> web.Response:
        lines = [running(self._shelf.models[each.model], each, await each.memory()) for each in self._host.loaded]
        return json_response({"models": sorted(lines, key=lambda line: str(line["expires_at"]), reverse=True)})

    async def _show(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        name = text_of(body, "model") or text_of(body, "name")
        if not name:
            raise RefusedError(400, "model is required")
        model = self._shelf.find(name)
        template = self._shelf.template(model)
        embeds = "EmbeddingGemma2Model" in str(model.json("config.json").get("architectures"))
        capabilities = ["embedding" if embeds else "completion"]
        capabilities += ["tools"] if template.knows_tools else []
        capabilities += ["vision"] if model.sees else []
        capabilities += ["thinking"] if template.closing else []
        return json_response(
            {
                "template": template.source or "",
                "details": model.details,
                "model_info": {"general.architecture": model.config.get("model_family", "")},
                "capabilities": capabilities,
            }
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        return await self._answer_prompt(body, Writer(request, flag_of(body, "stream", True)))

    async def _answer_prompt(self, body: Body, writer: Writer) -> web.StreamResponse:
        name = text_of(body, "model")
        job = Job(name, self._shelf.find(name), body, chat=False)
        prompt, raw = text_of(body, "prompt"), flag_of(body, "raw", False)
        if raw and (body.get("template") or body.get("system") or body.get("context")):
            raise RefusedError(400, "raw mode does not support template, system, or context")
        if body.get("template") or body.get("suffix"):
            raise RefusedError(400, "template and suffix are not supported here")
        job.media = media_of(body.get("images"))

        def messages() -> list[Message] | None:
            if raw:
                return None
            system = text_of(body, "system")
            content = marked(prompt, range(len(job.media)), built_in=job.model.has_renderer)
            return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": content}]

        return await self._run(writer, job, empty=not prompt, messages=messages, raw_prompt=prompt)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        return await self._answer_chat(body, Writer(request, flag_of(body, "stream", True)))

    async def _answer_chat(self, body: Body, writer: Writer) -> web.StreamResponse:
        name = text_of(body, "model")
        if not name:
            raise RefusedError(400, "model is required")
        job = Job(name, self._shelf.find(name), body, chat=True)
        given = body.get("messages") or []
        if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
            raise RefusedError(400, "json: cannot unmarshal messages: an array of objects is wanted")
        if body.get("tools") and not self._shelf.template(job.model).knows_tools:
            raise RefusedError(400, f"{job.model.name} does not support tools")

        def messages() -> list[Message]:
            return [self._message(message, job) for message in given]

        return await self._run(writer, job, empty=not given, messages=messages)

    async def _run(
        self,
        writer: Writer,
        job: Job,
        *,
        empty: bool,
        messages: Callable[[], list[Message] | None],
        raw_prompt: str = "",
    ) -> web.StreamResponse:
        keep_alive_s = keep_alive_of(job.body)
        alternatives = top_logprobs_of(job.body)
        if empty and keep_alive_s == 0:
            await self._host.unload(self._shelf.argument(job.model))
            return json_response(job.empty("unload"))
        think = self._think(job)
        options = options_of(job.body, self._host.generation)
        wants_logprobs = flag_of(job.body, "logprobs", False)
        try:
            async with self._shelf.runner(job.model, job.body, keep_alive_s) as loaded:
                job.loaded_ns = time.perf_counter_ns()
                if empty:
                    return json_response(job.empty("load"))
                if job.body.get("context"):
                    return await writer.fail(500, "not supported")
                prompt, thinking = await self._prompt(job, messages(), raw_prompt, think)
                wire = Request(prompt, options, wants_logprobs, alternatives, job.media or None)
                user_format = job.body.get("format") or None
                if not job.chat:
                    wire = replace(wire, format=wire_format(user_format, self._host.generation))
                    user_format = None  # never in two passes
                async with aclosing(parts(loaded.client, wire, thinking, user_format=user_format)) as answer:
                    await self._deliver(job, loaded, prompt, answer, writer)
        except (LoadError, StreamError, RenderingError, UndecodableError, aiohttp.ClientError) as error:
            return await writer.fail(500, str(error))
        except StatusError as error:
            kept = error.streamed or self._host.generation.keeps_status
            return await writer.fail(error.status if kept else 500, str(error))
        except (RefusedError, ConnectionError):
            raise
        except Exception as error:
            return await writer.fail(500, _unforeseen(error))
        return await writer.finish()

    async def _deliver(
        self, job: Job, loaded: Loaded, prompt: str, answer: AsyncGenerator[Part, None], writer: Writer
    ) -> None:
        text = ""
        async for part in answer:
            text += part.answer.content
            context = None
            if part.answer.done and not job.chat and not job.body.get("raw"):
                context = await loaded.client.tokenize(prompt + text)
            await writer.write(job.line(part, context))

    async def _prompt(
        self, job: Job, messages: list[Message] | None, raw_prompt: str, think: bool | None
    ) -> tuple[str, Thinking | None]:
        if messages is None:
            return raw_prompt, None
        template = self._shelf.template(job.model)
        tools = job.body.get("tools")
        prompt = await template.render(messages, tools if isinstance(tools, list) else None, think=think)
        if template.closing is None or not think:
            return prompt, None
        return prompt, Thinking(
            lambda thinking: template.after_thinking(prompt, thinking),
            closing=template.closing,
            opened=template.has_opened(prompt),
        )

    def _think(self, job: Job) -> bool | None:
        """Returns the user's wish to think, by default True; None for a model that cannot."""
        wanted = job.body.get("think")
        if self._shelf.template(job.model).closing is None:
            if wanted:
                raise RefusedError(400, f'"{job.name}" does not support thinking')
            return None
        return True if wanted is None else bool(wanted)

    @staticmethod
    def _message(message: Message, job: Job) -> Message:
        """Returns the message as templates read it; pictures become markers and go with the request."""
        first = len(job.media)
        job.media += media_of(message.get("images"))
        numbers = range(first, len(job.media))
        content = marked(str(message.get("content") or ""), numbers, built_in=job.model.has_renderer)
        kept = {key: value for key, value in message.items() if key != "images"}
        thinking = {"reasoning_content": message["thinking"]} if message.get("thinking") else {}
        return {**kept, "role": str(message.get("role", "user")), "content": content, **thinking}


def _unforeseen(error: Exception) -> str:
    """Returns the text of the error for the user, and prints a line for the person at the terminal."""
    print(f"scripts/host: {error!r}", file=sys.stderr)
    return str(error) or type(error).__name__


@web.middleware
async def _answer_refusals(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    if not is_local(*map(request.headers.get, HEADERS)):
        return _failed(request, 403, "only programs on this machine may use this host")
    try:
        return await handler(request)
    except (RefusedError, StatusError) as refusal:
        return _failed(request, refusal.status, str(refusal))
    except web.HTTPNotFound:
        return web.Response(text="404 page not found", status=404)
    except (web.HTTPException, ConnectionError):
        raise
    except Exception as error:
        return _failed(request, 500, _unforeseen(error))


def _failed(request: web.Request, status: int, text: str) -> web.Response:
    return json_response({"error": error_of(status, text) if request.path.startswith(ROUTES) else text}, status)
