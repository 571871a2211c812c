"""One round of `scripts/bench start`: a process from its spawn to its end. Times are the client's, in seconds."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import NamedTuple

from scripts.tools.bench.common.requests import SHORT_TOKENS, answer
from scripts.tools.bench.common.servers import Server
from scripts.tools.bench.llamas import Prompts
from scripts.tools.host.lib import LoadError, Process

LATER = 3
"""Requests after the first one."""
_TOKENS = 16
_POLL_S, _REST_S = 0.002, 0.2
PATIENCE_S = 60.0


class Started(NamedTuple):
    """From the spawn until the first 200, and until the first token of a request that is sent then."""

    ready_s: float
    token_s: float


class Took(NamedTuple):
    """From sending a request until its first token, and until the whole answer is there."""

    token_s: float
    whole_s: float


class First(NamedTuple):
    """The first request of a process, and the median of later ones."""

    first: Took
    later: Took

    @property
    def ratio(self) -> Took:
        """The times of the first request over those of later ones."""
        return Took(*(one / other for one, other in zip(self.first, self.later, strict=True)))


def start(server: Server, model: Path, prompts: Prompts, libraries: Path | None = None) -> Started:
    """Measures a process that answers one short request. `libraries` is the host's own directory, put in front of all
    others."""
    spawned = perf_counter()
    with _launched(server, model, libraries) as process:
        ready_s = _wait_ready(process, spawned) - spawned
        at = perf_counter() - spawned
        return Started(ready_s, at + _ask(server, process, model, prompts.text(SHORT_TOKENS)).token_s)


def ask_first(server: Server, model: Path, prompts: Prompts, length: int) -> First:
    """Measures a process that answers one prompt of so many tokens, and then others. It rests before each of them."""
    with _launched(server, model, None) as process:
        _wait_ready(process, perf_counter())
        first, *later = [_ask_rested(server, process, model, prompts.text(length)) for _ in range(1 + LATER)]
    return First(first, Took(*map(median, zip(*later, strict=True))))


@contextmanager
def _launched(server: Server, model: Path, libraries: Path | None) -> Iterator[Process]:
    process = server.launch(model, libraries)
    try:
        yield process
    finally:
        process.kill()


def _wait_ready(process: Process, since: float) -> float:
    """Waits for the first 200 and returns its time. Raises `LoadError`.

    A host asks every 100 ms, with a client that costs more than what is measured: this one writes bytes to a socket.
    """
    path = process.generation.ready_path
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()
    while True:
        try:
            with closing(socket.create_connection(("127.0.0.1", process.port), PATIENCE_S)) as connection:
                connection.sendall(request)
                if connection.recv(64).split(maxsplit=2)[1:2] == [b"200"]:
                    return perf_counter()
        except OSError:
            pass  # it does not listen yet
        now = perf_counter()
        if process.exit_status is not None or now - since > PATIENCE_S:
            raise LoadError(process.output.captured or f"exit status {process.exit_status}")
        sleep(_POLL_S)


def _ask_rested(server: Server, process: Process, model: Path, prompt: str) -> Took:
    sleep(_REST_S)
    return _ask(server, process, model, prompt)


def _ask(server: Server, process: Process, model: Path, prompt: str) -> Took:
    """By a client of its own: what one pays for its first request, all pay."""

    async def ask() -> Took:
        endpoint = server.endpoint(process, model)
        answered = await answer(endpoint, prompt, _TOKENS)
        await endpoint.close()
        return Took(answered.first_s, answered.times[-1] - answered.sent)

    return asyncio.run(ask())
