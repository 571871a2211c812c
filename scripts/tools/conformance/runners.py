"""The runner under test: its models, the processes that many cases share, and one generation's view of it."""

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Self

from scripts.tools.conformance.models import MAIN, write_models
from scripts.tools.host.lib import (
    Client,
    Completion,
    Generation,
    LoadError,
    Process,
    Reply,
    Request,
    capture,
    free_port,
)

CHUNK_TOKENS = 16
"""Prefill chunk that our own runner is asked for: small, so that a long prompt takes thousands of slices."""
READY_S = 45.0


class NotRunError(Exception):
    """The case cannot be tried on this runner, or in this call. The text says why."""


class NotReadyError(LoadError):
    """The process runs, but did not become ready within `READY_S`."""


class Runners:
    """The processes of one executable, and its models. A context manager of the main thread; ends every process that it
    started.

    `command` is what hosts would start, in one or more words; `faulty` the same runner with a fault in it (case 51).
    Processes are shared between the generations that spawn them alike: a runner cannot tell these apart.
    """

    def __init__(
        self, command: Sequence[str], *, faulty: Sequence[str] | None = None, cwd: Path | None = None, ranks: int = 1
    ) -> None:
        """`ranks` is for this repository's runner: over how many processes each one splits its model."""
        self._ranks = ranks
        self.command = command
        self.faulty = faulty
        self._cwd = cwd
        self._shared: dict[object, Process | LoadError] = {}
        self._caught: dict[Process, int] = {}
        self._prompts = 0
        self._directory = tempfile.TemporaryDirectory(prefix="mlx-runner-conformance-")
        self.models_dir = Path(self._directory.name) / "models"

    def __enter__(self) -> Self:
        # A shell that starts this in the background has it ignore SIGINT, and what it starts would inherit that. What
        # is handled, if only by doing nothing, is not inherited.
        self._ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if self._ignored:
            signal.signal(signal.SIGINT, lambda number, frame: None)
        write_models(Path(self._directory.name), self._ranks)
        return self

    def __exit__(self, *raised: object) -> None:
        self.renew()
        self._directory.cleanup()
        if self._ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def start(
        self,
        generation: Generation,
        words: Sequence[str],
        port: int,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None,
    ) -> Process:
        """Spawns `command` with `words` as arguments. OLLAMA_DEBUG is unset unless `environment` has it."""
        inherited = {key: value for key, value in os.environ.items() if key != "OLLAMA_DEBUG"}
        ours = {
            "OLLAMA_MODELS": str(self.models_dir),
            "MLX_RUNNER_PREFILL_CHUNK": str(CHUNK_TOKENS),
            "MLX_RUNNER_RANKS": str(self._ranks),
        }
        variables = {**inherited, **ours, **(environment or {})}
        return Process([*(command or self.command), *words], port, generation, variables, self._cwd)

    def shared(self, generation: Generation, model: str) -> Process:
        """Returns the running process of `model`, started at its first use. Raises `LoadError`, and the same one again
        later."""
        shared = self._shared  # that of this moment: a case that took too long may leave this call behind
        key = tuple(generation.argv("model", 1)), model
        if key not in shared:
            port = free_port()
            process = self.start(generation, generation.argv(model, port), port)
            shared[key] = process
            try:
                process.wait_ready(READY_S)
            except LoadError as error:
                late = process.exit_status is None
                process.kill()
                shared[key] = NotReadyError(f"{error} within {READY_S:g} s") if late else error
        found = shared[key]
        if isinstance(found, LoadError):
            raise found
        return found

    def renew(self) -> None:
        """Ends the shared processes: the next case gets fresh ones."""
        running, self._shared = self._running(), {}
        for process in running.values():
            process.kill()

    def _running(self) -> dict[object, Process]:
        return {key: process for key, process in self._shared.items() if isinstance(process, Process)}

    def complaint(self) -> str:
        """Returns the unexpected ends and error-like output of shared processes since the last call; empty when all is
        well."""
        found = []
        for key, process in self._running().items():
            if process.exit_status is not None:
                last = " ".join(process.output.lines[-1:]) or "(no output)"
                found.append(f"the process ended with status {process.exit_status}: {last}")
                del self._shared[key]
            lines = caught(process)
            if len(lines) > self._caught.get(process, 0):
                self._caught[process] = len(lines)
                found.append(f"hosts take this output for an error: {lines[-1]}")
        return "; ".join(found)

    def unheard(self) -> str:
        """Returns the beginning of a prompt that no process has seen."""
        self._prompts += 1
        return f"{self._prompts:05d} is the number of this prompt. "


def caught(process: Process) -> list[str]:
    """Returns the lines that hosts of v0.30.0 and later take for an error, whichever host started this process."""
    return [line for line in process.output.lines if capture(line)]


class Target:
    """A runner as one generation of hosts sees it, for one case. An async context manager; belongs to one loop."""

    def __init__(self, runners: Runners, generation: Generation) -> None:
        self.runners = runners
        self.generation = generation
        self._clients: dict[str, Client] = {}
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._open.aclose()

    async def process(self, model: str = MAIN) -> Process:
        return await asyncio.to_thread(self.runners.shared, self.generation, model)

    async def port(self, model: str = MAIN) -> int:
        return (await self.process(model)).port

    async def client(self, model: str = MAIN) -> Client:
        """Returns this generation's client of the shared process of `model`."""
        if model not in self._clients:
            process = await self.process(model)
            client = Client(await self.port(model), self.generation, process.output)
            self._clients[model] = await self._open.enter_async_context(client)
        return self._clients[model]

    async def complete(self, request: Request, model: str = MAIN) -> Completion:
        """Returns a whole completion, as this generation asks for it and reads it."""
        return await (await self.client(model)).complete(request)

    async def text(self, prompt: str, **options: object) -> str:
        return (await self.complete(Request(prompt, options))).text

    async def post(self, body: object, path: str = "/completion", model: str = MAIN) -> Reply:
        """Posts a raw body (bytes, or anything that JSON can say) and follows a 308 as hosts do."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        client = await self.client(model)
        for _ in range(2):
            reply = await client.send("POST", path, raw, {"Content-Type": "application/json"})
            if reply.status != 308:
                break
            path = reply.headers["location"]
        return reply

    @asynccontextmanager
    async def spawn(
        self,
        model: str = MAIN,
        *,
        words: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        faulty: bool = False,
        port: int | None = None,
        ready: bool = True,
    ) -> AsyncIterator[Process]:
        """Spawns a process for one case, killed at the end of the block. `words` are its arguments, with `{model}` and
        `{port}` replaced. Raises `LoadError` if it does not become ready."""
        if faulty and self.runners.faulty is None:
            raise NotRunError("needs a runner with a fault in it: --faulty COMMAND")
        port = free_port() if port is None else port
        arguments = [word.format(model=model, port=port) for word in words or self.generation.argv("{model}", port)]
        command = self.runners.faulty if faulty else None
        process = self.runners.start(self.generation, arguments, port, environment, command)
        try:
            if ready:
                await asyncio.to_thread(process.wait_ready, READY_S)
            yield process
        finally:
            await asyncio.to_thread(process.kill)
