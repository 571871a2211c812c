"""The routes, and what holds for all of them: guards, the form of refusals, the access log."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from http import HTTPStatus
from time import perf_counter

from aiohttp import web

from protocol import LOADED, status_body
from runner.engine.engine import Engine
from runner.errors import RequestError
from runner.logs import Log
from runner.server.completion import NUMBER, CompletionEndpoint
from runner.server.connections import Connection, Connections
from runner.server.guards import HEADERS, is_local
from runner.server.page import add_page
from runner.server.request_body import RequestBodies
from runner.server.score import ScoreEndpoint
from runner.server.stats import PATHS as _WATCHED_PATHS
from runner.server.stats import StatsEndpoints
from runner.server.stats_cache import StatsCache
from runner.server.tokenize import TokenizeEndpoint
from runner.server.tokenize_threads import TokenizeThreads

log = Log(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_STATUS_PATHS = ("/v1/status", "/health")
_COMPLETION_PATHS = ("/completion", "/v1/completions")
_SCORE_PATH = "/v1/score"
_STATS_CACHE = web.AppKey("stats_cache", StatsCache)
CONNECTIONS = web.AppKey("connections", Connections)


def make_app(engine: Engine, helper: Executor) -> web.Application:
    """Returns the runner's endpoints over an engine. `helper` runs slow work other than tokenizing."""

    async def status(_: web.Request) -> web.Response:
        return _json(status_body(engine.limits.context_length, engine.memory_bytes))

    async def loaded(http: web.Request) -> web.Response:
        return _json(LOADED if http.method in ("GET", "POST") else b"")

    async def embeddings(_: web.Request) -> web.Response:
        raise RequestError("this model does not support embeddings", HTTPStatus.NOT_IMPLEMENTED)

    threads, bodies = TokenizeThreads(), RequestBodies()
    completion = CompletionEndpoint(engine, helper, threads, bodies)
    tokenize = TokenizeEndpoint(engine, threads, bodies)
    app = web.Application(middlewares=[_handle], handler_args={"auto_decompress": False})
    app.on_cleanup.append(threads.close)
    for path in _STATUS_PATHS:
        app.router.add_get(path, status)
    for path in ("/v1/models", "/load"):
        app.router.add_route("*", path, loaded)
    for path in _COMPLETION_PATHS:
        app.router.add_post(path, completion.post)
    app.router.add_post("/v1/tokenize", tokenize.post)
    app.router.add_post("/v1/detokenize", tokenize.post_ids)
    app.router.add_post(_SCORE_PATH, ScoreEndpoint(engine, threads, bodies).post)
    app.router.add_post("/v1/embeddings", embeddings)
    stats = StatsEndpoints(engine, helper)
    app[_STATS_CACHE], app[CONNECTIONS] = stats.stats_cache, Connections()
    stats.add_to(app.router)
    add_page(app.router)
    return app


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


@web.middleware
async def _handle(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses foreign and surplus requests, writes refusals in the form hosts expect, and logs the request."""
    started, connections = perf_counter(), request.app[CONNECTIONS]
    connections.begin(request.protocol)
    try:
        if not is_local(*map(request.headers.get, HEADERS)):
            response: web.StreamResponse = _refusal(403, "only programs on this machine may use the runner")
        elif connections.is_full and request.path not in _STATUS_PATHS:
            response = _refusal(503, f"{connections.most} connections are busy, which is the limit: try again later")
        else:
            response = await handler(request)
    except RequestError as error:
        response = _refusal(error.status, str(error))
        if request.path in (*_COMPLETION_PATHS, _SCORE_PATH) and NUMBER not in request:
            request.app[_STATS_CACHE].refused += 1
    except web.HTTPMethodNotAllowed as error:
        response = _refusal(error.status, "Method Not Allowed")
        response.headers["Allow"] = error.headers["Allow"]
    except web.HTTPNotFound:
        response = _refusal(404, "404 page not found")
    except web.RequestPayloadError:
        response = _refusal(400, "Bad Request")
    except (asyncio.CancelledError, ConnectionResetError):  # while waiting or writing
        write = log.debug if request.path in _WATCHED_PATHS else log.info
        write("the client is gone", path=request.path, **_named(request))
        raise
    except web.HTTPException as error:
        response = _refusal(error.status, error.reason)
    except Exception:
        log.exception("a request failed", path=request.path, **_named(request))
        raise  # the server answers 500, or breaks off a stream that has begun
    finally:
        connections.end(request.protocol)
    if not request.content.is_eof():
        response.force_close()
        if isinstance(request.protocol, Connection):
            request.protocol.refuse_rest(request)
    _log_access(request, response.status, perf_counter() - started)
    return response


def _refusal(status: int, text: str) -> web.Response:
    """Returns an error as Go's net/http writes it."""
    return web.Response(status=status, text=f"{text}\n", headers={"X-Content-Type-Options": "nosniff"})


def _log_access(http: web.Request, status: int, took_s: float) -> None:
    polled = http.path in (*_STATUS_PATHS, *_WATCHED_PATHS)
    write = log.warning if status >= 400 else log.trace if polled else log.debug
    write("ServeHTTP", method=http.method, path=http.path, took=f"{took_s * 1e3:.3f}ms", status=status, **_named(http))


def _named(http: web.Request) -> dict[str, int]:
    """Returns the number under which the engine logs the request, if it has one."""
    return {"request": http[NUMBER]} if NUMBER in http else {}
