"""Clients that disconnect at every moment of a request and in every way: the next is served, and nothing leaks."""

import asyncio
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.tools.conformance.scripted_model import CONTEXT
from scripts.tools.host.lib import Client, Process, Request, spawn
from tests.process.conftest import CHUNK_TOKENS, MAIN, RUNNER, read_stats

ALPHABET = "jklmnopqrstuvwxyz"
ENDLESS = b'{"Prompt":"0"}'
SHORT = b'{"Prompt":"w"}'
LONG = b'{"Prompt":"%s"}' % (b"q" * (CONTEXT - 100))
TOO_LONG = b'{"Prompt":"%s"}' % (b"word " * 100_000)  # half a megabyte, tokenized whole and refused
_WAIT_S = 60.0
_GROWTH_BYTES = 256 << 10


@pytest.fixture(scope="module")
def process(models_dir: Path) -> Iterator[Process]:
    arguments = ["--prefill-chunk", str(CHUNK_TOKENS)]
    with spawn(RUNNER, MAIN, models_dir=models_dir, arguments=arguments) as process:
        process.wait_ready(60)
        yield process
        assert process.exit_status is None
    assert not process.output.captured
    assert not [line for line in process.output.lines if "level=ERROR" in line or "Traceback" in line]


def connect(process: Process) -> socket.socket:
    return socket.create_connection(("127.0.0.1", process.port), timeout=_WAIT_S)


def head(body: bytes) -> bytes:
    return b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)


def read_until(client: socket.socket, wanted: bytes, times: int = 1) -> None:
    """Reads until `wanted` has arrived `times` times."""
    seen = b""
    while seen.count(wanted) < times:
        chunk = client.recv(65536)
        assert chunk, f"{wanted!r} never came"
        seen += chunk


def before_the_end_of_the_body(client: socket.socket) -> None:
    client.sendall(head(LONG) + LONG[:1000])


def tokenizing(client: socket.socket) -> None:
    client.sendall(head(TOO_LONG) + TOO_LONG)
    time.sleep(0.03)


def prefill(client: socket.socket) -> None:
    client.sendall(head(LONG) + LONG)
    read_until(client, b"\r\n\r\n")  # the head of the answer: the request has left the queue
    time.sleep(0.1)


def queued(client: socket.socket) -> None:
    """Pipelines a second request, which waits in the server behind the first."""
    client.sendall(head(ENDLESS) + ENDLESS + head(SHORT) + SHORT)
    read_until(client, b"Content")


def decode(client: socket.socket) -> None:
    client.sendall(head(ENDLESS) + ENDLESS)
    read_until(client, b"Content", 30)


def final_line(client: socket.socket) -> None:
    client.sendall(head(SHORT) + SHORT)
    read_until(client, b'"Done":true')


def not_reading(client: socket.socket) -> None:
    """Fills the client's buffers and the runner's."""
    client.sendall(head(ENDLESS) + ENDLESS)
    time.sleep(0.3)


MOMENTS: tuple[Callable[[socket.socket], None], ...] = (
    *(before_the_end_of_the_body, tokenizing, queued, prefill, decode, not_reading, final_line),
)


def close(client: socket.socket) -> None:
    client.close()


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def half_close(client: socket.socket) -> None:
    """Closes the sending side; the runner treats that as a disconnect, as Go's server does."""
    client.shutdown(socket.SHUT_WR)
    try:
        while client.recv(65536):
            pass
    except ConnectionError:
        pass
    client.close()


async def next_answer(client: Client) -> str:
    """Returns the answer to a short prompt."""
    return (await asyncio.wait_for(client.complete(Request("Hi")), _WAIT_S)).text


async def uncached_bytes(client: Client) -> int:
    """Returns the memory that the cache does not account for: a prefill that gets further may fill the cache more."""
    stats = await read_stats(client)
    return stats.memory.used_bytes - stats.cache.held_bytes


@pytest.mark.parametrize("leave", [close, reset, half_close], ids=lambda leave: leave.__name__)
async def test_a_client_may_disconnect_at_any_moment(leave: Callable[[socket.socket], None], process: Process) -> None:
    held = []
    async with Client.of(process) as client:
        for _ in range(2):
            for arrive in MOMENTS:
                leaving = connect(process)
                arrive(leaving)
                leave(leaving)
                assert await next_answer(client) == ALPHABET, arrive.__name__
            held.append(await uncached_bytes(client))
        async with asyncio.timeout(_WAIT_S):  # what a half-closed connection asked for is still computed
            while held[-1] - held[0] >= _GROWTH_BYTES:
                await asyncio.sleep(0.1)
                held.append(await uncached_bytes(client))
