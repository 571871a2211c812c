"""Starts the process: parses the command line, and runs a command, or opens a model and serves it."""

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from runner import cpu, logs
from runner.cli.parse import parse_command, unknown_variables
from runner.errors import ModelError, RunnerError, UsageError
from runner.logs import Log
from runner.model import OpenedModel, open_model
from runner.ollama.hand_over import HandOver
from runner.process import parent
from runner.process.limits import DescriptorShortage, check_threads, raise_limit
from runner.settings import CheckSettings, FollowSettings, ReplaySettings, Settings, TopSettings, context_limit
from runner.terminal import STATUS_LINE
from runner.wings import chooser, routes_of

if TYPE_CHECKING:
    from runner.engine.engine import Engine

log = Log(__name__)
_HOST = "127.0.0.1"
_THREADS = 20
"""The threads that run at the same time, without those of a BLAS. Fifteen are for the engine, the helpers, tokenizing,
MLX and reading weights; five are for the libraries of a device."""
_HELPERS = 2
_KEEP_S = 0.3
"""The longest time for which a signal waits for the disk cache. Hosts wait 5 seconds for the end, users less."""


def run_process(argv: Sequence[str]) -> NoReturn:
    """Runs the command in `argv`. Without a command, serves a model until a signal ends the process."""
    parent_pid = os.getppid()
    try:
        settings = parse_command(argv, os.environ)
        logs.start(settings.log_level)
        if warning := unknown_variables(os.environ):
            log.warning(warning)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # texts are tokenized one at a time, where threads gain nothing
        if isinstance(settings, Settings | CheckSettings):
            check_threads(_THREADS + cpu.Threads.of(settings.blas_threads).prompts)
        if not isinstance(settings, Settings):
            gc.enable()
            _run_command(settings)
        _run(settings, parent_pid)
    except UsageError as error:
        logs.die(error, status=2)
    except RunnerError as error:
        logs.die(error)
    except Exception as error:
        log.exception("the runner died")
        logs.die(error)


def _run_command(settings: CheckSettings | TopSettings | ReplaySettings | FollowSettings) -> NoReturn:
    match settings:
        case CheckSettings():
            from runner.commands.check import check

            check(settings)
        case TopSettings():
            from runner.numbers.top import top

            top(settings)
        case ReplaySettings():
            from runner.tape.command import replay

            replay(settings)
        case FollowSettings():
            from runner.ranks.service import follow

            follow(settings)


def _run(settings: Settings, parent_pid: int) -> NoReturn:
    if settings.watch_parent and parent.was_adopted(parent_pid):
        os._exit(1)
    for warning in settings.warnings:
        log.warning(warning)
    listener = _bind(settings.port)
    hand_over = HandOver(settings, parent_pid)
    try:
        model = _open(settings)
    except ModelError as error:
        hand_over.refuse(error)
    # `offer` may import MLX.
    preloaded = cpu.preload(settings.blas, settings.blas_threads, settings.kernels)
    hand_over.offer(model)
    if not settings.hosted:
        STATUS_LINE.enable()
    log.info("starting", model=model.name, **preloaded._asdict())
    asyncio.run(_serve(settings, model, listener, parent_pid, hand_over))
    raise AssertionError("a server ends only with its process")


def _open(settings: Settings) -> OpenedModel:
    """Opens the model, and limits its context length by the settings."""
    model = open_model(settings.model, settings.models_dir, chooser(settings))
    for warning in model.checkpoint.warnings:
        log.warning(warning)
    limit = context_limit(model.context_length, settings.context_tokens)
    if settings.context_tokens and settings.context_tokens > limit:
        log.warning("the model's context is shorter than --context", wanted=settings.context_tokens, context=limit)
    return model._replace(context_length=limit)


def _bind(port: int) -> socket.socket:
    """Binds the port without listening. So a port in use is reported immediately, and no client connects too early."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with _naming_the_port(port):
        listener.bind((_HOST, port))
    return listener


@contextmanager
def _naming_the_port(port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        advice = "choose another --port, or 0 for a free one"
        raise RunnerError(f"listen tcp {_HOST}:{port}: bind: {reason}; {advice}") from error


async def _serve(
    settings: Settings, model: OpenedModel, listener: socket.socket, parent_pid: int, hand_over: HandOver
) -> None:
    """Loads the model on the engine thread, and the tokenizer in a helper; imports the server meanwhile; then
    serves."""
    watch = asyncio.create_task(parent.exit_with_host(parent_pid)) if settings.watch_parent else None
    from runner import build
    from runner.engine.engine import Engine
    from runner.tokenizer import open_tokenizer

    helper = ThreadPoolExecutor(_HELPERS, "helper")
    if settings.verify:
        from runner.commands.check.digests import verify_digests

        await asyncio.get_running_loop().run_in_executor(
            helper, verify_digests, model.checkpoint, model.tensors.values()
        )
    tokenizer = helper.submit(open_tokenizer, model.file, merge_eos=not model.checkpoint.from_store)
    engine = Engine(settings, model, tokenizer, build, hand_over.refuse)
    ready = engine.start(asyncio.get_running_loop())
    from runner.process.lean_aiohttp import import_server

    import_server()
    from aiohttp import web

    from runner.server.routes import CONNECTIONS, make_app

    raise_limit()
    asyncio.get_running_loop().set_exception_handler(DescriptorShortage().handle)
    # Malformed HTTP would fill the log with tracebacks. The app itself logs its own faults.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    app = make_app(engine, helper, routes_of(engine, helper))
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    assert runner.server is not None
    await ready.wait()
    gc.freeze()  # collections then skip these objects, which stay, while a client waits for a token
    gc.enable()
    with _naming_the_port(settings.port):  # another process may have bound the same port and listened first
        await app[CONNECTIONS].serve(runner.server, listener)
    if settings.disk_cache is not None:
        _end_later(engine)
    log.info("listening", url=f"http://{_HOST}:{listener.getsockname()[1]}")
    await (watch or asyncio.Event().wait())


def _end_later(engine: "Engine") -> None:
    """Makes SIGINT and SIGTERM wait, for a moment at most, until all conversations are in the disk cache."""
    signals = (signal.SIGINT, signal.SIGTERM)

    def end(number: int, _: object) -> None:
        for each in signals:  # a second signal ends the process immediately
            signal.signal(each, signal.SIG_DFL)
        engine.keep().wait(_KEEP_S)
        os.kill(os.getpid(), number)

    for each in signals:
        signal.signal(each, end)
