"""Renders a chat into one prompt with the model's own chat template, as transformers does, without importing that."""

import asyncio
import contextlib
import json
import re
import signal
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from scripts.tools.host.models import Model

LIMIT_S = 5
"""Of a rendering; real templates take milliseconds."""
_LIMIT_BYTES = 1 << 30
_MOST_CHARACTERS = 16 << 20
_PROCESSES = 4
_LENGTH = struct.Struct(">Q")
_WORKER = Path(__file__).with_name("template_worker.py")


class RenderingError(Exception):
    """The template refuses the chat, is wrong, or goes too far. The text is for the user."""


class Renderer:
    """The processes, started when they are needed and kept for the next chat. Owner: the event loop."""

    def __init__(self, limit_s: int = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._idle: list[Process] = []
        self._places = asyncio.Semaphore(_PROCESSES)

    async def render(self, source: str, values: Mapping[str, object]) -> str:
        """Renders `values`, which are JSON, by the template `source`. Raises `RenderingError`.

        Whoever is cancelled ends the rendering, too.
        """
        job = json.dumps([source, values]).encode()
        async with self._places:
            process = self._idle.pop() if self._idle else await self._start()
            try:
                answer = await _ask(process, job)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise RenderingError(self._reason(await _status(process))) from error
            except BaseException:
                await _end(process)
                raise
            self._idle.append(process)
        if "error" in answer:
            raise RenderingError(answer["error"])
        return answer["text"]

    async def close(self) -> None:
        while self._idle:
            await _end(self._idle.pop())

    async def _start(self) -> Process:
        limits = [str(self._limit_s), str(_LIMIT_BYTES), str(_MOST_CHARACTERS)]
        return await asyncio.create_subprocess_exec(
            sys.executable, "-I", str(_WORKER), *limits, stdin=PIPE, stdout=PIPE
        )

    def _reason(self, status: int) -> str:
        if status == -signal.SIGALRM:
            return f"the chat template did not end within {self._limit_s} s"
        return f"the process that rendered the chat template ended with status {status}"


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await _status(process)


async def _status(process: Process) -> int:
    """Of a process that ends of itself or was killed, once it has ended and its pipes are closed.

    One that ends of itself must not be killed as well: asyncio could lose its status.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    with contextlib.suppress(ConnectionError):
        await process.stdin.wait_closed()
    await process.stdout.read()
    return await process.wait()


async def _ask(process: Process, job: bytes) -> dict[str, str]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(_LENGTH.pack(len(job)))
    process.stdin.write(job)
    await process.stdin.drain()
    (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    answer: dict[str, str] = json.loads(await process.stdout.readexactly(length))
    return answer


_SPECIAL = re.compile(r"[a-z_]+_token")
_OPENING, _CLOSING = "<think>", "</think>"

Message = Mapping[str, object]


class ChatTemplate:
    """The chat template of one model; a model without one gets its roles spelled out."""

    def __init__(self, model: Model, renderer: Renderer) -> None:
        self._renderer = renderer
        self._config = model.json("tokenizer_config.json")
        self._sources = _sources(model, self._config)

    @property
    def source(self) -> str | None:
        """None for a model that has no template."""
        return self._sources.get("default")

    @property
    def closing(self) -> str | None:
        """The tag that ends its thinking, if the template knows thinking."""
        return _CLOSING if _CLOSING in (self.source or "") else None

    @property
    def knows_tools(self) -> bool:
        return "tool_use" in self._sources or "tools" in (self.source or "")

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        tokens = {}
        for key, value in self._config.items():
            text = value.get("content") if isinstance(value, dict) else value
            if _SPECIAL.fullmatch(key) and isinstance(text, str):
                tokens[key] = text
        return tokens

    async def render(
        self, messages: Sequence[Message], tools: Sequence[object] | None = None, *, think: bool | None = None
    ) -> str:
        """The prompt for the model's next turn. Raises `RenderingError` when the template refuses the chat.

        A BOS at its start is left out where the runner adds it.
        """
        source = self._sources.get("tool_use", self.source) if tools else self.source
        if source is None:
            return _spelled_out(messages)
        given = {} if think is None else {"enable_thinking": think, "thinking": think}
        values = {**self.special_tokens, **given, "messages": messages, "tools": tools or None}
        text = await self._renderer.render(source, {**values, "add_generation_prompt": True})
        bos = self.special_tokens.get("bos_token", "")
        return text.removeprefix(bos) if self._config.get("add_bos_token") is True else text

    @staticmethod
    def after_thinking(prompt: str, thinking: str) -> str:
        """The prompt that goes on behind finished thinking."""
        opening = "" if prompt.rstrip().endswith(_OPENING) else f"{_OPENING}\n"
        return f"{prompt}{opening}{thinking.strip()}\n{_CLOSING}\n\n"

    @staticmethod
    def has_opened(prompt: str) -> bool:
        """Returns True if the answer begins inside the thinking."""
        return prompt.rstrip().endswith(_OPENING)


def _sources(model: Model, config: Mapping[str, object]) -> dict[str, str]:
    """Templates by name; the one that counts is called `default`."""
    of_file = model.text("chat_template.jinja")
    if of_file is not None:
        return {"default": of_file}
    for value in (config.get("chat_template"), model.json("chat_template.json").get("chat_template")):
        if isinstance(value, str):
            return {"default": value}
        if isinstance(value, list):
            named = {str(item.get("name")): item.get("template") for item in value if isinstance(item, dict)}
            sources = {name: text for name, text in named.items() if isinstance(text, str)}
            return {"default": next(iter(sources.values())), **sources} if sources else {}
    return {}


def _spelled_out(messages: Sequence[Message]) -> str:
    turns = [f"{message['role']}: {message['content']}\n" for message in messages]
    return "".join(turns) + "assistant:"
