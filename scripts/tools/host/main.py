"""Serves a model through this runner with Ollama's own interface, without Ollama.

The host of scripts/tools/host/lib starts, keeps and evicts the runner as an Ollama of the chosen generation does. Here
it answers /api/generate, /api/chat, /api/tags, /api/ps, /api/show, /api/version, /v1/systemone, and OpenAI's
/v1/chat/completions, /v1/completions and /v1/models, for curl, the `ollama` program and other clients.
"""

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from runner.cli.parse import parse_check
from runner.ollama.plan import own_command
from scripts.tools.host.api import Api
from scripts.tools.host.go_json import dumps
from scripts.tools.host.lib import GENERATIONS, Generation, Host, LoadError
from scripts.tools.host.lib.golang import host_duration_s
from scripts.tools.host.models import Catalog, Model

PORT = 11434
PORTS_TRIED = 20
GENERATION = "H"
"""The newest release."""
_LETTERS = {generation.letter: generation for generation in GENERATIONS}
_EPILOG = """\
Words after -- go to the runner: scripts/host qwen3 -- --cache single
Without MODEL the demo model of this repository is served, as demo:latest. Messages and prompts may have "images", a
list of files in base64, as in Ollama: docs/media.md has examples."""


class Wanted(NamedTuple):
    model: str | None
    port: int | None
    generation: Generation
    runner: list[str]
    models_dir: str | None
    keep_alive_s: float
    max_loaded: int
    words: list[str]


def parse(argv: Sequence[str]) -> Wanted:
    """Parses the command line. Exits for --help and for errors."""
    parser = argparse.ArgumentParser(
        prog="scripts/host",
        usage="%(prog)s [OPTIONS] [MODEL] [-- WORD ...]",
        description=__doc__.partition("\n")[0],
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a name in the store, or a directory")
    parser.add_argument("--port", type=int, help=f"the port on 127.0.0.1 (default: {PORT}, or the next free one)")
    parser.add_argument(
        "--generation",
        choices=_LETTERS,
        default=GENERATION,
        metavar="LETTER",
        help="the releases of Ollama to imitate: "
        + "; ".join(f"{generation.letter} {generation.releases}" for generation in GENERATIONS)
        + " (default: %(default)s)",
    )
    parser.add_argument("--runner", metavar="COMMAND", help="any other executable that speaks the runner protocol")
    parser.add_argument("--models-dir", metavar="DIR", help="the store (default: as for mlx-runner)")
    parser.add_argument(
        "--keep-alive",
        default="5m",
        metavar="DURATION",
        help="time until an idle model is unloaded (default: %(default)s)",
    )
    parser.add_argument(
        "--max-loaded", type=int, default=3, metavar="N", help="the most models loaded at once (default: %(default)s)"
    )
    own, words = list(argv), []
    if "--" in own:
        own, words = own[: own.index("--")], own[own.index("--") + 1 :]
    given = parser.parse_args(own)
    try:
        keep_alive_s = host_duration_s(given.keep_alive)
    except ValueError as error:
        parser.error(f"--keep-alive: {error}")
    if given.port is not None and not 0 <= given.port <= 65535:
        parser.error("--port: 0 to 65535")
    try:
        runner = list(own_command()) if given.runner is None else shlex.split(given.runner)
    except ValueError as error:
        parser.error(f"--runner: {error}")
    if not runner:
        parser.error("--runner: a command is wanted")
    if given.max_loaded < 1:
        parser.error("--max-loaded: at least 1 is wanted")
    return Wanted(
        model=given.model,
        port=given.port,
        generation=_LETTERS[given.generation],
        runner=runner,
        models_dir=given.models_dir,
        keep_alive_s=keep_alive_s if keep_alive_s >= 0 else float("inf"),
        max_loaded=given.max_loaded,
        words=words,
    )


def listen(port: int | None) -> socket.socket:
    """Returns a listening socket on `port`, or on the first free one from `PORT` on. Exits if there is none."""
    for candidate in [port] if port is not None else range(PORT, PORT + PORTS_TRIED):
        bound = socket.socket()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(("127.0.0.1", candidate))
            bound.listen()
        except OSError as error:
            bound.close()
            reason = error.strerror
        else:
            return bound
    sys.exit(f"scripts/host: listen tcp 127.0.0.1:{candidate}: {reason}")


def open_catalog(wanted: Wanted, stack: ExitStack) -> tuple[Catalog, Path, Model]:
    """Returns the catalog, the models directory and the model that was named. Exits if there is none of that name."""
    if wanted.model is None:
        # Imports MLX, which nothing else here needs.
        from scripts.tools.demo.subjects import MODEL, demo_store

        models_dir = stack.enter_context(demo_store(new_store=wanted.generation.new_store))
        catalog, name = Catalog(models_dir), MODEL
    else:
        place = ["--models-dir", wanted.models_dir] if wanted.models_dir else []
        models_dir, name = parse_check([wanted.model, *place], os.environ).models_dir, wanted.model
        catalog = Catalog(models_dir)
        if name.startswith(("/", ".", "~")) or (Path(name).is_dir() and catalog.find(name) is None):
            directory = Path(name).expanduser()
            if not directory.is_dir():
                sys.exit(f"scripts/host: {name}: no such directory")
            catalog, name = Catalog(models_dir, directory), str(directory.resolve())
    model = catalog.find(name)
    if model is None:
        sys.exit(f"scripts/host: model '{name}' not found in {models_dir}")
    return catalog, models_dir, model


@asynccontextmanager
async def serving(app: web.Application, listener: socket.socket) -> AsyncIterator[None]:
    """Serves until the block ends; a client that goes away cancels its request."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        yield
    finally:
        await runner.cleanup()


def copy_to_stderr(chunk: bytes) -> None:
    """Copies to stderr, as a host does with all that its runner writes."""
    with contextlib.suppress(BrokenPipeError):
        os.write(2, chunk)


async def serve(wanted: Wanted, catalog: Catalog, models_dir: Path, model: Model, listener: socket.socket) -> int:
    """Loads the model, prints how to use it, and serves until SIGINT or SIGTERM; returns the exit status."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def report(line: str) -> None:
        # A Ctrl-C goes to the runner too.
        if not stop.is_set():
            print(f"scripts/host: {line}", file=sys.stderr)

    host = Host(
        wanted.runner,
        generation=wanted.generation,
        models_dir=models_dir,
        arguments=wanted.words,
        copy_to=copy_to_stderr,
        keep_alive_s=wanted.keep_alive_s,
        max_loaded=wanted.max_loaded,
        report=report,
    )
    api = Api(host, catalog)
    async with host, serving(api.app(), listener):
        loading = asyncio.create_task(api.load(model))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            return 130
        try:
            loading.result()
        except LoadError as error:
            stopping.cancel()
            print(f"scripts/host: {model.name} does not load: {error}", file=sys.stderr)
            return 1
        print(usage(wanted, model, listener.getsockname()[1]), flush=True)
        await stopping
    return 0


def usage(wanted: Wanted, model: Model, port: int) -> str:
    name = model.name.removesuffix(":latest")
    address = f"127.0.0.1:{port}"
    greedy = {"temperature": 0}
    chat = dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}], "options": greedy})
    generate = dumps({"model": name, "prompt": "Hello", "stream": False, "options": greedy})
    question = {"type": "noul", "instructions": "Is it urgent?"}
    decide = dumps({"model": name, "state": "The site is down.", "questions": {"urgent": question}})
    see = dumps({"model": name, "prompt": "What is this?", "images": ["%s"], "stream": False})
    shown = f"""  printf '{see}' "$(base64 < picture.jpg | tr -d '\\n')" | curl http://{address}/api/generate -d @-\n"""
    return f"""
Serving {model.name} on http://{address} as Ollama {wanted.generation.releases} does. From another terminal:

  curl -N http://{address}/api/chat -d '{chat}'
  curl http://{address}/api/generate -d '{generate}'
{shown if model.sees else ""}  curl http://{address}/v1/systemone -d '{decide}'
  curl http://{address}/api/ps
  curl http://{address}/api/generate -d '{{"model":"{name}","keep_alive":0}}'
  OLLAMA_HOST={address} ollama run {name}

Clients of OpenAI's interface take http://{address}/v1 as their base URL, and any key. Ctrl-C ends it and its runner."""


def main() -> None:
    wanted = parse(sys.argv[1:])
    with ExitStack() as stack:
        catalog, models_dir, model = open_catalog(wanted, stack)
        listener = listen(wanted.port)
        status = asyncio.run(serve(wanted, catalog, models_dir, model, listener))
    sys.exit(status)


if __name__ == "__main__":
    main()
