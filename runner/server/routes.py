"""The routes, and the rules for all routes: access for local programs only, refusals, the access log."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor
from functools import partial
from http import HTTPStatus
from time import perf_counter
from typing import NoReturn
from urllib.parse import urlsplit

from aiohttp import web

from protocol import LOADED, BadRequestError, status_body
from runner.engine.engine import Engine
from runner.errors import RequestError
from runner.logs import Log, harmless
from runner.server.completion import NUMBER, CompletionEndpoint, told
from runner.server.connections import Connection, Connections
from runner.server.intake import Incoming, Intake
from runner.server.scoring import ScoreEndpoint
from runner.server.tokenize import TokenizeEndpoint

log = Log(__name__)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
HEADERS = ("Host", "Origin", "Sec-Fetch-Site")
"""The headers that are the arguments of `is_local`, in this order."""


def is_local(host: str | None, origin: str | None, fetch_site: str | None) -> bool:
    """Returns True if a request with these `Host`, `Origin` and `Sec-Fetch-Site` headers comes from a local program.

    A browser sends the `Origin` of the page; after DNS rebinding, its `Host` is the attacker's name. For requests
    without an `Origin` (pictures, scripts, links), its `Sec-Fetch-Site` is `cross-site`. Local programs send a loopback
    `Host`, and no `Origin` or a loopback one.
    """
    if fetch_site == "cross-site":
        return False
    return (host is None or _is_loopback(f"//{host}")) and (origin is None or _is_loopback(origin))


def _is_loopback(url: str) -> bool:
    try:
        name = urlsplit(url).hostname or ""
    except ValueError:
        return False
    return name in _LOOPBACK or name.endswith(".localhost")


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_NO_MEMORY = "out of memory: "
"""The beginning of the text that `runner.logs.exception_line` returns for a lack of memory."""
_STATUS_PATHS = ("/v1/status", "/health")
_WATCHED_PATHS = ("/v1/stats", "/v1/cache", "/v1/events", "/metrics")
"""Paths of wings that programs request again and again."""
_COMPLETION_PATHS = ("/completion", "/v1/completions")
_SCORE_PATH = "/v1/score"
_CHAT_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
_ELSEWHERE = (
    "404 page not found: this is the port of a runner, which serves one model and not Ollama's API. For chats,"
    " /api/... and OpenAI's paths ask Ollama on its own port, which is 11434 unless OLLAMA_HOST names another;"
    " `mlx-runner ollama serve` starts it with this runner. Here, POST /completion completes a prompt as it is:"
    ' {"Prompt": "...", "Options": {"num_predict": 100}}'
)
"""The response to a client that takes this port for Ollama's. Hosts know the first words."""
_ENGINE = web.AppKey("engine", Engine)
CONNECTIONS = web.AppKey("connections", Connections)


def make_app(engine: Engine, helper: Executor, routes: Iterable[web.RouteDef] = ()) -> web.Application:
    """Returns the web application with the runner's endpoints over an engine, and with the `routes` of wings. `helper`
    runs slow work other than tokenizing."""

    async def status(_: web.Request) -> web.Response:
        dimensions = engine.encoder_use.dimensions
        return _json(status_body(engine.limits.context_length, engine.memory_bytes, dimensions))

    async def loaded(http: web.Request) -> web.Response:
        return _json(LOADED if http.method in ("GET", "POST") else b"")

    async def post_by_model(of_text: Handler, http: web.Request) -> web.StreamResponse:
        """Answers with the encoder's endpoint for this path or, if there is none, with `of_text`."""
        endpoint = engine.encoder_use.endpoints.get(http.path)
        if endpoint is None:
            return await of_text(http)
        with Incoming(intake, engine.vision) as incoming:
            await incoming.read_all(http, endpoint.most_bytes)
            checked = await incoming.check_body(endpoint.check(incoming.chunks))
            incoming.hold(checked.held_bytes)
            await incoming.decode(checked.shown)
            return _json(await checked.answer())

    intake = Intake()
    completion = CompletionEndpoint(engine, helper, intake)
    tokenize = TokenizeEndpoint(engine, intake)
    app = web.Application(middlewares=[_handle], handler_args={"auto_decompress": False})
    app.on_cleanup.append(intake.close)
    for path in _STATUS_PATHS:
        app.router.add_get(path, status)
    for path in ("/v1/models", "/load"):
        app.router.add_route("*", path, loaded)
    for path in _COMPLETION_PATHS:
        app.router.add_post(path, completion.post)
    app.router.add_post("/v1/tokenize", tokenize.post)
    app.router.add_post("/v1/detokenize", tokenize.post_ids)
    score = ScoreEndpoint(engine, intake)
    for path, of_text in ((_SCORE_PATH, score.post), ("/v1/embeddings", _refuse_embeddings)):
        app.router.add_post(path, partial(post_by_model, of_text))
    app.add_routes(routes)
    app[_ENGINE] = engine
    app[CONNECTIONS] = Connections()
    return app


async def _refuse_embeddings(_: web.Request) -> NoReturn:
    raise RequestError("this model does not support embeddings", HTTPStatus.NOT_IMPLEMENTED)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


@web.middleware
async def _handle(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses foreign and surplus requests (`is_local`, `is_full`), writes refusals as hosts expect, logs requests."""
    started = perf_counter()
    connections = request.app[CONNECTIONS]
    connections.begin(request.protocol)
    try:
        if not is_local(*map(request.headers.get, HEADERS)):
            response: web.StreamResponse = _refusal(403, "only programs on this machine may use the runner")
        elif connections.is_full and request.path not in _STATUS_PATHS:
            response = _refusal(503, f"{connections.most} connections are busy, which is the limit: try again later")
        else:
            response = await handler(request)
    except (RequestError, BadRequestError) as error:
        if isinstance(error, RequestError):
            response = _refusal(error.status, str(error))
        else:
            response = _refusal(400, f"Bad Request: {error}")  # hosts read the first words
        request.app[_ENGINE].refused += _is_ours_to_count(request)
    except web.HTTPMethodNotAllowed as error:
        response = _refusal(error.status, "Method Not Allowed")
        response.headers["Allow"] = error.headers["Allow"]
    except web.HTTPNotFound:
        elsewhere = request.path.startswith("/api/") or request.path in _CHAT_PATHS
        response = _refusal(404, _ELSEWHERE if elsewhere else "404 page not found")
    except web.RequestPayloadError:
        response = _refusal(400, "Bad Request: the body is not encoded as its headers state")
    except (asyncio.CancelledError, ConnectionResetError):  # raised while waiting or writing
        write = log.debug if request.path in _WATCHED_PATHS else log.info
        write("the client is gone", path=request.path, **_named(request))
        raise
    except web.HTTPException as error:
        response = _refusal(error.status, error.reason)
    except Exception:
        log.exception("a request failed", path=request.path, **_named(request))
        request.app[_ENGINE].failed += _is_ours_to_count(request)
        raise  # the server answers 500, or aborts a response that has begun
    finally:
        connections.end(request.protocol)
    if not request.content.is_eof():
        response.force_close()
        if isinstance(request.protocol, Connection):
            request.protocol.refuse_rest(request)
    _log_access(request, response.status, perf_counter() - started)
    return response


def _is_ours_to_count(request: web.Request) -> bool:
    """Returns True for a completion or score request that did not reach the engine: the engine counts the others."""
    return request.path in (*_COMPLETION_PATHS, _SCORE_PATH) and NUMBER not in request


def _refusal(status: int, text: str) -> web.Response:
    """Returns an error response in one line, as Go's net/http writes errors. A host that reads `out of memory` in it
    unloads all models, so these words are changed if they come from a client."""
    line = told(text)
    line = line if line.startswith(_NO_MEMORY) else harmless(line)
    return web.Response(status=status, text=f"{line}\n", headers={"X-Content-Type-Options": "nosniff"})


def _log_access(http: web.Request, status: int, took_s: float) -> None:
    polled = http.path in (*_STATUS_PATHS, *_WATCHED_PATHS)
    write = log.warning if status >= 400 else log.trace if polled else log.debug
    write("ServeHTTP", method=http.method, path=http.path, took=f"{took_s * 1e3:.3f}ms", status=status, **_named(http))


def _named(http: web.Request) -> dict[str, int]:
    """Returns the number by which the engine's log names the request, as a dict; an empty dict if there is none."""
    return {"request": http[NUMBER]} if NUMBER in http else {}
