"""The contenders: servers that run throughout and rest while another one is measured, and what they are asked.

All times are those of the client, in seconds.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple, Protocol

import aiohttp

from runner.device import device
from scripts.tools import ROOT
from scripts.tools.bench.llamas import B3, M1, M10, M10_PACKED, M60, M700, Size, make_model, write_model
from scripts.tools.conformance.this_runner import RUNNER
from scripts.tools.host.lib import F_SECOND, A, Client, LoadError, Process, Request, StatusError, free_port, spawn
from scripts.tools.models.store import write_store

_START_S, _POLL_S = 120, 0.01
_DATA, _DONE = b"data: ", b"[DONE]"
_STORED = "bench"


Lines = AsyncIterator[str]
"""The content of the lines of an answer that hold some, one after another."""


class Endpoint(Protocol):
    """A server that is asked over HTTP. Belongs to one event loop."""

    cached: int | None
    """The tokens of the last completely answered prompt that came from the cache; None if the server does not tell."""

    def stream(self, prompt: str, tokens: int) -> AbstractAsyncContextManager[Lines]:
        """Returns a greedy answer of this length. To leave the block early closes the connection."""
        ...

    async def close(self) -> None: ...


class Server(NamedTuple):
    """A contender: the command that starts it, the protocol, that of hosts or that of OpenAI's clients, and whether it
    takes models from an Ollama store only."""

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    speaks_openai: bool = False
    needs_store: bool = False

    def prepare(self, directory: Path, stack: ExitStack) -> Path:
        """Returns what it opens: the model's directory, or a store with the same model, which ends with the stack."""
        if not self.needs_store:
            return directory
        store = Path(stack.enter_context(TemporaryDirectory(prefix="bench-store-")))
        write_store(store, _STORED, directory)
        return store

    def launch(self, model: Path) -> Process:
        """Returns a process that may not be ready; `model` is what `prepare` returned."""
        if self.speaks_openai:
            port = free_port()
            argv = [*self.command, "--model", str(model), "--port", str(port)]
            return Process(argv, port, A, {**os.environ, **self.environment}, ROOT)
        name, models_dir = (_STORED, model) if self.needs_store else (str(model), None)
        return spawn(
            self.command, name, models_dir=models_dir, generation=F_SECOND, environment=self.environment, cwd=ROOT
        )

    def start(self, model: Path, stack: ExitStack) -> Process:
        """Starts a process that is ready, and ends with the stack. Raises ValueError if it does not start."""
        process = self.launch(model)
        stack.callback(process.kill)
        try:
            process.wait_ready(_START_S, _POLL_S)
        except LoadError as error:
            raise ValueError(f"{self.name} did not start: {error}") from error
        return process

    def endpoint(self, process: Process, model: Path) -> Endpoint:
        return _OpenAI(process.port, str(model)) if self.speaks_openai else _Runner(Client.of(process))


def this_runner(name: str, parallel: int, draft: str = "off") -> Server:
    """Drafts are off by default: random models repeat themselves, and would be several times as fast with them."""
    return Server(name, RUNNER, {"MLX_RUNNER_PARALLEL": str(parallel), "MLX_RUNNER_DRAFT": draft})


class _Runner:
    def __init__(self, client: Client) -> None:
        self.cached: int | None = None
        self._client = client

    @asynccontextmanager
    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[Lines]:
        async with self._client.stream(Request(prompt, {"num_predict": tokens})) as answers:

            async def lines() -> Lines:
                async for answer in answers:
                    if answer.content:
                        yield answer.content
                    if answer.done:
                        self.cached = answer.prompt_eval_cached_count

            yield lines()

    async def close(self) -> None:
        await self._client.close()


class _OpenAI:
    """`POST /v1/completions` with server-sent events."""

    def __init__(self, port: int, model: str) -> None:
        self.cached: int | None = None
        self._model = model
        self._session = aiohttp.ClientSession(
            f"http://127.0.0.1:{port}",
            timeout=aiohttp.ClientTimeout(),
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )

    @asynccontextmanager
    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[Lines]:
        body = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "stream": True}
        async with self._session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                raise StatusError(response.status, await response.text())

            async def lines() -> Lines:
                async for line in response.content:
                    event = line.removeprefix(_DATA).strip()
                    if line.startswith(_DATA) and event != _DONE and (text := json.loads(event)["choices"][0]["text"]):
                        yield text

            yield lines()

    async def close(self) -> None:
        await self._session.close()


SHORT_TOKENS = 16
"""Of a short prompt."""
FEW_TOKENS = 4
"""Of an answer of which only the first matters."""


class MismeasuredError(Exception):
    """A server did not do what was asked, so its times mean nothing."""


class Answered(NamedTuple):
    """An answer: when it was asked for, the time of each line that holds content, and the content."""

    sent: float
    times: list[float]
    text: str

    @property
    def first_s(self) -> float:
        return self.times[0] - self.sent

    @property
    def tokens_per_s(self) -> float:
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])


async def answer(endpoint: Endpoint, prompt: str, tokens: int) -> Answered:
    """Returns the whole greedy answer. Raises `MismeasuredError` unless there are as many lines as tokens."""
    times, pieces = [], []
    sent = perf_counter()
    async with endpoint.stream(prompt, tokens) as lines:
        async for text in lines:
            times.append(perf_counter())
            pieces.append(text)
    if len(times) != tokens:
        raise MismeasuredError(f"{len(times)} lines came for {tokens} tokens")
    return Answered(sent, times, "".join(pieces))


async def first_line_s(endpoint: Endpoint, prompt: str) -> float:
    """Returns the seconds from sending a prompt to its first line; the few other lines are read too."""
    return (await answer(endpoint, prompt, FEW_TOKENS)).first_s


OURS, BARE, BARE_ONE_CORE = "ours", "bare loop", "bare loop, one core"
MLX_LM, OLLAMA = PEERS = ("mlx_lm.server", "Ollama's")
SIZES = {"1M": M1, "10M": M10, "10M-packed": M10_PACKED, "60M": M60, "700M": M700, "3B": B3}


def default_sizes() -> tuple[str, ...]:
    """Returns the sizes that the device is asked to compute by default."""
    return ("1M", "10M", "60M") if device() == "cpu" else ("10M", "700M", "3B")


def servers(
    arguments: argparse.Namespace, say: Callable[[str], None], parallel: int = 1, draft: str = "off"
) -> list[Server]:
    """Returns our runner, the peers, which speak its protocol, and Ollama's own if it is named, else mlx-lm's server if
    that is installed; for `parallel` requests at once."""
    peers = [Server(name, command, {"OLLAMA_NUM_PARALLEL": str(parallel)}) for name, command in arguments.peer]
    ours = [this_runner(OURS, parallel, draft), *peers]
    if arguments.ollama:
        return [*ours, Server(OLLAMA, arguments.ollama, {}, needs_store=True)]
    if importlib.util.find_spec("transformers") is None:
        say(f"{MLX_LM} is left out: it needs transformers")
        return ours
    command = [sys.executable, "-m", "scripts.tools.bench.mlx_lm_server"]
    # Its kernels are as ready as ours: on a CPU none is compiled while it answers.
    ready = {"MLX_DISABLE_COMPILE": "1"} if device() == "cpu" else {}
    return [*ours, Server(MLX_LM, command, ready, speaks_openai=True)]


def random_model(size: Size, seed: int, stack: ExitStack) -> Path:
    """Returns the directory of a random Llama, which is there until the stack ends."""
    directory = Path(stack.enter_context(TemporaryDirectory(prefix="bench-")))
    write_model(directory, make_model(size, seed), size)
    return directory


def serve(model: Path, servers: Sequence[Server], stack: ExitStack, loop: asyncio.Runner) -> dict[str, Endpoint]:
    """Starts the servers with the same model, until the stack ends. Returns an endpoint of each, by its name.
    ValueError if one does not start."""
    return {
        server.name: open_endpoint(server, server.start(server.prepare(model, stack), stack), model, stack, loop)
        for server in servers
    }


def open_endpoint(server: Server, process: Process, model: Path, stack: ExitStack, loop: asyncio.Runner) -> Endpoint:
    """Returns an endpoint of a server's process, for use in `loop`; it is closed with the stack."""

    async def opened() -> Endpoint:
        return server.endpoint(process, model)  # its client belongs to the loop that runs

    endpoint = loop.run(opened())
    stack.callback(lambda: loop.run(endpoint.close()))
    return endpoint
