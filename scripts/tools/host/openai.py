"""OpenAI's interface as Ollama has it: `/v1/chat/completions`, `/v1/completions`, `/v1/models`.

Each request becomes one to /api/chat or /api/generate, and each line of the answer a chunk of OpenAI's: here is the
translation alone. What this host cannot do is refused by name. One message stays one message, whatever its parts are;
Ollama makes a message of each part.
"""

import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from scripts.tools.host.go_json import Body, RefusedError, Writer, dumps, flag_of, json_response, read_body, text_of
from scripts.tools.host.models import Model
from scripts.tools.host.shelf import Shelf

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/embeddings")
"""The beginnings of the paths that answer in OpenAI's form."""
_TYPES = {400: "invalid_request_error", 404: "not_found_error"}
_NUMBERS = ("temperature", "top_p", "seed", "frequency_penalty", "presence_penalty")
_LIMITS = ("max_tokens", "max_completion_tokens")
_MISSING = ("tools", "functions", "logit_bias", "audio", "suffix", "echo", "best_of")
_DATA_URL = re.compile(r"data:[^,]*;base64,")
_EFFORTS = ("high", "medium", "low", "none")
Answering = Callable[[Body, Writer], Awaitable[web.StreamResponse]]


def error_of(status: int, text: str) -> dict[str, object]:
    """Returns the `error` of a body: an object here, where Ollama's own interface has a text."""
    return {"message": text, "type": _TYPES.get(status, "api_error"), "param": None, "code": None}


class OpenAi:
    """The routes. `chat` and `generate` answer as /api/chat and /api/generate do, into a writer."""

    def __init__(self, shelf: Shelf, chat: Answering, generate: Answering) -> None:
        self._shelf = shelf
        self._chat = chat
        self._generate = generate

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self._complete_chat),
            web.post("/v1/completions", self._complete),
            web.get("/v1/models", self._models),
            web.get("/v1/models/{model:.+}", self._model),
        ]

    async def _complete_chat(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        return await self._chat(chat_of(body), OpenAiWriter(request, body, chat=True))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        prompt = text_of(body, "prompt")
        if not prompt:
            raise RefusedError(400, "prompt: a text is wanted")
        return await self._generate({**_common(body), "prompt": prompt}, OpenAiWriter(request, body, chat=False))

    async def _models(self, _: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [_listed(model) for model in self._shelf.catalog.all()]})

    async def _model(self, request: web.Request) -> web.Response:
        return json_response(_listed(self._shelf.find(request.match_info["model"])))


def _listed(model: Model) -> dict[str, object]:
    owner = model.name.rpartition("/")[0].rpartition("/")[2] or "library"
    return {"id": model.name, "object": "model", "created": int(model.modified), "owned_by": owner}


def chat_of(body: Body) -> dict[str, object]:
    """Returns the request to /api/chat. Raises `RefusedError`."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedError(400, "messages: an array of at least one message is wanted")
    effort = _object(body, "reasoning").get("effort") or body.get("reasoning_effort")
    if effort and effort not in _EFFORTS:
        raise RefusedError(400, f"reasoning_effort: one of {', '.join(_EFFORTS)} is wanted, not {effort!r}")
    return {
        **_common(body),
        "messages": [_message(each) for each in messages],
        "format": _format(body.get("response_format")),
        "think": effort != "none" if effort else None,
        "logprobs": body.get("logprobs"),
        "top_logprobs": body.get("top_logprobs"),
    }


def _common(body: Body) -> dict[str, object]:
    """Returns the model and the options of a request. Raises `RefusedError` for what this host cannot do."""
    for key in _MISSING:
        if body.get(key):
            raise RefusedError(400, f"{key}: not supported by scripts/host; use your Ollama")
    if body.get("n") not in (None, 1):
        raise RefusedError(400, "n: only 1 is supported")
    options: dict[str, object] = {"temperature": 1.0, "top_p": 1.0}
    for key in (*_NUMBERS, *_LIMITS):
        value = body.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
            raise RefusedError(400, f"{key}: a number is wanted")
        if value is not None:
            options["num_predict" if key in _LIMITS else key] = value
    stop = body.get("stop")
    if stop is not None:
        stops = stop if isinstance(stop, list) else [stop]
        if not all(isinstance(each, str) for each in stops):
            raise RefusedError(400, "stop: a text or an array of texts is wanted")
        options["stop"] = stops
    return {"model": text_of(body, "model"), "options": options}


def _object(body: Body, key: str) -> Mapping[str, object]:
    value = body.get(key)
    if value is not None and not isinstance(value, dict):
        raise RefusedError(400, f"{key}: an object is wanted")
    return value or {}


def _format(form: object) -> object:
    match form:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return "json"
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
    raise RefusedError(400, "response_format: text, json_object, or a json_schema with its schema is wanted")


def _message(message: object) -> dict[str, object]:
    """Returns a message of /api/chat: the texts of the parts line by line, their pictures beside them."""
    match message:
        case {"tool_calls": [_, *_]}:
            raise RefusedError(400, "messages: tool_calls are not supported by scripts/host; use your Ollama")
        case {"role": str(role), "content": str(content), **rest}:
            thinking = {"thinking": rest["reasoning"]} if rest.get("reasoning") else {}
            return {"role": role, "content": content, **thinking}
        case {"role": str(role), "content": [*parts]}:
            texts: list[str] = []
            images: list[str] = []
            for part in parts:
                match part:
                    case {"type": "text", "text": str(text)}:
                        texts.append(text)
                    case {"type": "image_url", "image_url": {"url": str(url)} | str(url)}:
                        images.append(_base64(url))
                    case _:
                        raise RefusedError(400, "messages: a part has a text or an image_url")
            return {"role": role, "content": "\n".join(texts), "images": images}
    raise RefusedError(400, "messages: each has a role, and a content of text or parts")


def _base64(url: str) -> str:
    head = _DATA_URL.match(url)
    if head is None:
        raise RefusedError(400, "image_url: only data: URLs in base64 are supported")
    return url[head.end() :]


class OpenAiWriter(Writer):
    """Delivers an answer as OpenAI's chunks, or as one object."""

    kind = "text/event-stream"

    def __init__(self, request: web.Request, body: Body, *, chat: bool) -> None:
        super().__init__(request, flag_of(body, "stream", False))
        self._with_usage = flag_of(_object(body, "stream_options"), "include_usage", False)
        self._chat = chat
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{random.randrange(999)}"
        self._created = int(time.time())

    def streamed(self, line: dict[str, object]) -> bytes:
        if "error" in line:
            return _event(line)
        data = _event(self._completion(line, "delta"))
        if line["done"]:
            if self._with_usage:
                data += _event({**self._completion(line, "delta"), "choices": [], "usage": _usage(line)})
            data += b"data: [DONE]\n\n"
        return data

    def whole(self, line: dict[str, object]) -> dict[str, object]:
        return {**self._completion(line, "message"), "usage": _usage(line)}

    def error(self, status: int, text: str) -> object:
        return error_of(status, text)

    def _completion(self, line: Mapping[str, object], key: str) -> dict[str, object]:
        kind = "chat.completion" if self._chat else "text_completion"
        choice: dict[str, object] = {"index": 0, "finish_reason": line.get("done_reason")}
        if self._chat:
            message = line["message"]
            assert isinstance(message, dict)
            reasoning = {"reasoning": message["thinking"]} if "thinking" in message else {}
            choice[key] = {"role": "assistant", "content": message["content"], **reasoning}
            if "logprobs" in line:
                choice["logprobs"] = {"content": line["logprobs"]}
        else:
            choice["text"] = line["response"]
        return {
            "id": self._id,
            "object": f"{kind}.chunk" if self._chat and key == "delta" else kind,
            "created": self._created,
            "model": line["model"],
            "system_fingerprint": "fp_ollama",
            "choices": [choice],
        }


def _event(value: object) -> bytes:
    return f"data: {dumps(value)}\n\n".encode()


def _usage(line: Mapping[str, object]) -> dict[str, int]:
    prompt, answer = (int(str(line.get(key, 0))) for key in ("prompt_eval_count", "eval_count"))
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
