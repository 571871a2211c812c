"""Requests and answers of Ollama's interface: what is read, what is written, in which words it is refused.

Pictures and sounds are told by their first bytes (docs/internals/wire.md, 2.9).
"""

import asyncio
import base64
import binascii
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from aiohttp import web

from scripts.tools.host.lib import Answer, Generation, Loaded, Logprob, Medium, Part
from scripts.tools.host.lib.golang import LONGEST_S, Pairs, keep_alive_s, read_json, valid_text
from scripts.tools.host.models import Model

Body = Mapping[str, object]
_INTEGERS = {
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "draft_num_predict", "num_keep", "seed"),
    *("num_predict", "top_k", "repeat_last_n"),
}
_MAX_FLOAT32 = (2 - 2**-24) * 2.0**127
"""The bound from which numbers round to infinity as a float32."""
_REASONS = {0: "stop", 1: "length"}


class RefusedError(Exception):
    """A request that ends before a runner sees it, with an HTTP status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def dumps(value: object) -> str:
    """Compact, with the escapes of Go."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


async def read_body(request: web.Request) -> Body:
    """The JSON object of a request: every number finite, every string valid Unicode. Raises `RefusedError`."""
    try:
        raw = await request.read()
    except web.RequestPayloadError as error:
        raise RefusedError(400, "the body is not encoded as its headers state") from error
    return await asyncio.to_thread(_parsed, raw)  # a large one takes seconds, which are nobody else's


def _parsed(raw: bytes) -> Body:
    if not raw.strip():
        raise RefusedError(400, "missing request body")
    try:
        body = _valid(read_json(raw))
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, str(error)) from error
    if not isinstance(body, dict):
        raise RefusedError(400, f"json: cannot unmarshal {type(body).__name__} into an object")
    return body


def _valid(value: object) -> object:
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, Pairs):
        return {valid_text(key): _valid(item) for key, item in value}
    if isinstance(value, list):
        return [_valid(item) for item in value]
    if isinstance(value, (int, float)) and abs(value) > sys.float_info.max:
        raise ValueError("json: cannot unmarshal a number into Go value of type float64")
    return value


def text_of(body: Body, key: str) -> str:
    """A string of the request, empty if it is missing. Raises `RefusedError`."""
    value = body.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RefusedError(400, f"json: cannot unmarshal {key}: a string is wanted")
    return value


def flag_of(body: Body, key: str, default: bool) -> bool:
    """A boolean of the request. Raises `RefusedError`."""
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RefusedError(400, f"json: cannot unmarshal {key}: a boolean is wanted")
    return value


def keep_alive_of(body: Body) -> float | None:
    """Seconds; None if the request names none. Raises `RefusedError`."""
    if body.get("keep_alive") is None:
        return None
    try:
        return keep_alive_s(body["keep_alive"])
    except ValueError as error:
        raise RefusedError(400, str(error)) from error


def top_logprobs_of(body: Body) -> int:
    """Returns the number of alternatives wanted. Raises `RefusedError`."""
    value = body.get("top_logprobs") or 0
    if not isinstance(value, int) or not 0 <= value <= 20:
        raise RefusedError(400, "top_logprobs must be between 0 and 20")
    return value


def options_of(body: Body, generation: Generation) -> dict[str, object]:
    """The host's defaults under the request's own options; unknown ones are passed over. Raises `RefusedError`."""
    given = body.get("options") or {}
    if not isinstance(given, dict):
        raise RefusedError(400, "json: cannot unmarshal options: an object is wanted")
    options = dict(generation.default_options)
    for key, value in given.items():
        if value is not None:
            options[key] = _option(key, value)
    return options


def _option(key: str, value: object) -> object:
    if key == "stop":
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise RefusedError(500, f'option "{key}" must be of type array')
        return value
    if key == "use_mmap":
        if not isinstance(value, bool):
            raise RefusedError(500, f'option "{key}" must be of type boolean')
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RefusedError(500, f'option "{key}" must be of type {"integer" if key in _INTEGERS else "float32"}')
    if key not in _INTEGERS and abs(value) > _MAX_FLOAT32:
        raise RefusedError(500, f"json: unsupported value: {'+' if value > 0 else '-'}Inf")
    return int(value) if key in _INTEGERS else float(value)


def now() -> str:
    """As Go writes the time: UTC, no zeros at the end of the fraction."""
    return timestamp(time.time())


def timestamp(seconds: float) -> str:
    """`time.time()` as Go writes it, no later than Go's longest duration from now."""
    moment = datetime.fromtimestamp(min(seconds, time.time() + LONGEST_S), UTC)
    fraction = f"{moment.microsecond:06d}".rstrip("0")
    return f"{moment:%Y-%m-%dT%H:%M:%S}{'.' + fraction if fraction else ''}Z"


class Spent(NamedTuple):
    """The host's own measurements, in nanoseconds."""

    total: int
    load: int


def metrics(answer: Answer, spent: Spent | None) -> dict[str, object]:
    """The counters of a line, without zeros."""
    values = {
        "total_duration": spent.total if spent else 0,
        "load_duration": spent.load if spent else 0,
        "prompt_eval_count": answer.prompt_eval_count,
        "prompt_eval_cached_count": answer.prompt_eval_cached_count,
        "prompt_eval_duration": answer.prompt_eval_duration,
        "eval_count": answer.eval_count,
        "eval_duration": answer.eval_duration,
    }
    return {key: value for key, value in values.items() if value or (value == 0 and key == "prompt_eval_cached_count")}


def done_reason(answer: Answer) -> dict[str, object]:
    """`done_reason`, if the line has one."""
    reason = _REASONS.get(answer.done_reason) if answer.done else None
    return {"done_reason": reason} if reason else {}


def logprobs(entries: Sequence[Logprob]) -> list[dict[str, object]]:
    """With the bytes of each token, as the host adds them."""

    def token(text: str, logprob: float) -> dict[str, object]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return [
        {
            **token(entry.token, entry.logprob),
            **({"top_logprobs": [token(*alternative) for alternative in entry.top]} if entry.top else {}),
        }
        for entry in entries
    ]


def listed(model: Model) -> dict[str, object]:
    """One line of `/api/tags`."""
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": timestamp(model.modified),
        "size": model.size_bytes,
        "digest": model.digest,
        "details": model.details,
    }


def running(model: Model, loaded: Loaded, memory: int) -> dict[str, object]:
    """One line of `/api/ps`."""
    expires = loaded.expires_at if loaded.users == 0 else time.time() + loaded.keep_alive_s
    return {
        "name": model.name,
        "model": model.name,
        "size": memory,
        "digest": model.digest,
        "details": model.details,
        "expires_at": timestamp(expires),
        "size_vram": memory,
        "context_length": loaded.context_length,
    }


_IMAGES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM", b"\0\0\1\0", b"\0\0\2\0")
"""The beginnings of PNG, JPEG, GIF, BMP and icons."""
_PLACE = "[img]"
"""A user may write this where a picture belongs."""


def media_of(images: object) -> list[Medium]:
    """Returns the media that a request has in base64. Raises `RefusedError`."""
    if images is None:
        return []
    if not isinstance(images, list):
        raise RefusedError(400, "json: cannot unmarshal images: an array is wanted")
    try:
        found = [base64.b64decode(image, validate=True) for image in images]
    except (TypeError, ValueError, binascii.Error) as error:
        raise RefusedError(400, f"illegal base64 data in images: {error}") from error
    return [Medium(data, kind_of(data)) for data in found]


def kind_of(data: bytes) -> str:
    """Returns `image`, `audio`, or "" for bytes that the host does not know: HEIC, AVIF, TIFF, damaged beginnings."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "audio"
    if data.startswith(b"ID3") or (data[:1] == b"\xff" and data[1:2] >= b"\xe0"):
        return "audio"
    is_webp = data[:4] == b"RIFF" and data[8:14] == b"WEBPVP"
    return "image" if is_webp or data.startswith(_IMAGES) else ""


def marked(text: str, numbers: Iterable[int], *, built_in: bool) -> str:
    """Returns the text of a message with a marker for each of its media: in place of `[img]`, else in front.

    `built_in`: the host renders the model's chats with code of its own, not with a template. That puts a space behind
    the markers, and leaves alone a message that has some already.
    """
    if built_in and "[img-" in text:
        return text
    front = ""
    for number in numbers:
        marker = f"[img-{number}]"
        if _PLACE in text:
            text = text.replace(_PLACE, marker, 1)
        else:
            front += marker
    space = " " if built_in and front and text[:1].strip() else ""
    return f"{front}{space}{text}"


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

    kind = "application/x-ndjson"

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
            self._response = web.StreamResponse(headers={"Content-Type": self.kind})
            await self._response.prepare(self._request)
        await self._response.write(self.streamed(line))

    async def finish(self) -> web.StreamResponse:
        if self._response is not None:
            await self._response.write_eof()
            return self._response
        return json_response(self.whole(joined(self._lines))) if self._lines else web.Response(content_type=self.kind)

    async def fail(self, status: int, text: str) -> web.StreamResponse:
        error: dict[str, object] = {"error": self.error(status, text)}
        if self._response is None:
            return json_response(error, status or 200)
        await self.write(error)
        return await self.finish()

    def streamed(self, line: dict[str, object]) -> bytes:
        """Returns the bytes of a line in a stream."""
        return dumps(line).encode() + b"\n"

    def whole(self, line: dict[str, object]) -> dict[str, object]:
        """Returns the object for the joined lines."""
        return line

    def error(self, status: int, text: str) -> object:
        """Returns the `error` of a body or a line."""
        return text


def joined(lines: list[dict[str, object]]) -> dict[str, object]:
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
