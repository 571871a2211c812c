"""Servers under measurement: processes, and endpoints that hide which protocol they speak."""

import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import aiohttp

from runner.model.weights.dtype import device
from runner.settings import DEFAULT_MAX_GAP_MS
from scripts.tools import ROOT
from scripts.tools.conformance.this_runner import RUNNER
from scripts.tools.host.lib import (
    F_SECOND,
    A,
    Client,
    LoadError,
    Medium,
    Process,
    Request,
    StatusError,
    free_port,
    spawn,
)

_START_S = 120
_DATA, _DONE = b"data: ", b"[DONE]"


Lines = AsyncIterator[str]
"""The content of the lines of an answer that hold some, one after another."""


class Endpoint(Protocol):
    """A server that is asked over HTTP. Belongs to one event loop."""

    cached: int | None
    """The tokens of the last completely answered prompt that came from the cache; None if the server does not tell."""

    def stream(self, prompt: str, tokens: int) -> AbstractAsyncContextManager[Lines]:
        """The greedy answer of so many tokens. Whoever leaves the block early closes the connection."""
        ...

    async def close(self) -> None: ...


class Server(NamedTuple):
    """A contender: the command that starts it, and the protocol, that of hosts or that of OpenAI's clients."""

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    speaks_openai: bool = False

    def launch(self, model: Path, libraries: Path | None = None) -> Process:
        """A process that may not be ready. `libraries`: the host's own directory, put in front of all others."""
        if self.speaks_openai:
            port = free_port()
            argv = [*self.command, "--model", str(model), "--port", str(port)]
            return Process(argv, port, A, {**os.environ, **self.environment}, ROOT)
        return spawn(
            self.command,
            str(model),
            generation=F_SECOND,
            environment=self.environment,
            libraries=libraries,
            cwd=ROOT,
        )

    def start(self, model: Path, stack: ExitStack) -> Process:
        """Starts a process that is ready, and ends with the stack. ValueError if it does not start."""
        process = self.launch(model)
        stack.callback(process.kill)
        try:
            process.wait_ready(_START_S)
        except LoadError as error:
            raise ValueError(f"{self.name} did not start: {error}") from error
        return process

    def endpoint(self, process: Process, model: Path) -> Endpoint:
        """Asks that process."""
        return _OpenAI(process.port, str(model)) if self.speaks_openai else RunnerEndpoint(Client.of(process))


def this_runner(
    name: str, parallel: int, max_gap_ms: int = DEFAULT_MAX_GAP_MS, *, blas: str, blas_threads: str
) -> Server:
    """Returns the runner of this tree."""
    settings = {"PARALLEL": parallel, "MAX_GAP_MS": max_gap_ms, "BLAS": blas, "BLAS_THREADS": blas_threads}
    return Server(name, RUNNER, {f"MLX_RUNNER_{key}": str(value) for key, value in settings.items()})


def other_runner(name: str, command: Sequence[str], parallel: int) -> Server:
    """Returns any executable that speaks the runner protocol."""
    return Server(name, command, {"OLLAMA_NUM_PARALLEL": str(parallel)})


def mlx_lm_server(name: str, blas: str, blas_threads: str) -> Server:
    """Returns mlx-lm's own server, its kernels as ready as ours: on a CPU none is compiled while it answers."""
    command = [sys.executable, "-m", "scripts.tools.bench.common.mlx_lm_server", blas, blas_threads]
    return Server(name, command, {"MLX_DISABLE_COMPILE": "1"} if device() == "cpu" else {}, speaks_openai=True)


class RunnerEndpoint:
    """The runner protocol, as a host speaks it. Each prompt shows the same pictures, if there are any."""

    def __init__(self, client: Client, *pictures: Medium) -> None:
        self.client = client
        self.cached: int | None = None
        self.prompt_tokens = 0
        """The tokens of the last prompt that was answered to the end."""
        self._pictures = pictures

    @asynccontextmanager
    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[Lines]:
        async with self.client.stream(
            Request(prompt, {"num_predict": tokens}, media=self._pictures or None)
        ) as answers:

            async def lines() -> Lines:
                async for answer in answers:
                    if answer.content:
                        yield answer.content
                    if answer.done:
                        self.cached = answer.prompt_eval_cached_count
                        self.prompt_tokens = answer.prompt_eval_count

            yield lines()

    async def close(self) -> None:
        await self.client.close()


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
