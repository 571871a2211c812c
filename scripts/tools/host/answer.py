"""One answer of Ollama's interface on its way to the user: its lines, streamed or joined."""

import time
from dataclasses import dataclass, field

from aiohttp import web

from scripts.tools.host.go_json import Body, Spent, done_reason, dumps, logprobs, metrics, now
from scripts.tools.host.lib import Medium, Part
from scripts.tools.host.models import Model

_NDJSON = "application/x-ndjson"


@dataclass
class Job:
    """One request to /api/generate or /api/chat on its way."""

    name: str
    """The model as the user calls it."""
    model: Model
    body: Body
    chat: bool
    started_ns: int = field(default_factory=time.perf_counter_ns)
    loaded_ns: int = 0
    media: list[Medium] = field(default_factory=list)

    def line(self, part: Part, context: list[int] | None = None) -> dict[str, object]:
        """Returns the line for one part, its keys in Ollama's order."""
        answer = part.answer
        thinking = {"thinking": part.thinking} if part.thinking else {}
        entries = {"logprobs": logprobs(answer.logprobs)} if answer.logprobs else {}
        spent = None
        if answer.done:
            spent = Spent(time.perf_counter_ns() - self.started_ns, self.loaded_ns - self.started_ns)
        head = {"model": self.name, "created_at": now()}
        end = {"done": answer.done, **done_reason(answer)}
        if self.chat:
            message = {"role": "assistant", "content": part.content, **thinking}
            return {**head, "message": message, **end, **entries, **metrics(answer, spent)}
        ids = {"context": context} if context else {}
        return {**head, "response": part.content, **thinking, **end, **ids, **metrics(answer, spent), **entries}

    def empty(self, reason: str) -> dict[str, object]:
        """Returns the answer to a request that only loads or unloads."""
        text: dict[str, object] = {"message": {"role": "assistant", "content": ""}} if self.chat else {"response": ""}
        return {"model": self.name, "created_at": now(), **text, "done": True, "done_reason": reason}


class Writer:
    """Delivers the lines of one answer: as they come, or joined at the end."""

    def __init__(self, request: web.Request, stream: bool) -> None:
        self._request = request
        self._stream = stream
        self._response: web.StreamResponse | None = None
        self._lines: list[dict[str, object]] = []

    async def write(self, line: dict[str, object]) -> None:
        if not self._stream:
            self._lines.append(line)
            return
        if self._response is None:
            self._response = web.StreamResponse(headers={"Content-Type": _NDJSON})
            await self._response.prepare(self._request)
        await self._response.write(dumps(line).encode() + b"\n")

    async def finish(self) -> web.StreamResponse:
        if self._response is not None:
            await self._response.write_eof()
            return self._response
        return json_response(joined(self._lines)) if self._lines else web.Response(content_type=_NDJSON)

    async def fail(self, status: int, text: str) -> web.StreamResponse:
        """Sends the error as the answer, or as its last line."""
        if self._response is None:
            return json_response({"error": text}, status or 200)
        await self.write({"error": text})
        return await self.finish()


def joined(lines: list[dict[str, object]]) -> dict[str, object]:
    """Returns the last line with the texts and logprobs of all."""
    whole = dict(lines[-1])
    entries = [entry for line in lines for entry in _list(line.get("logprobs"))]
    if entries:
        whole["logprobs"] = entries
    key = "content" if "message" in whole else "response"
    sources = [_dict(line["message"]) if "message" in line else line for line in lines]
    texts = {name: "".join(str(source.get(name, "")) for source in sources) for name in (key, "thinking")}
    if not texts["thinking"]:
        del texts["thinking"]
    if "message" in whole:
        whole["message"] = {"role": "assistant", **texts}
        return whole
    ordered = {name: whole.pop(name) for name in ("model", "created_at")}
    return {**ordered, **texts, **{name: value for name, value in whole.items() if name not in texts}}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _dict(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def json_response(value: object, status: int = 200) -> web.Response:
    return web.Response(text=dumps(value), status=status, content_type="application/json", charset="utf-8")
