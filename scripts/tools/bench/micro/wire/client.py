"""The client of `scripts/bench wire`: plain sockets that are read as fast as it goes."""

import json
import selectors
import socket
import subprocess
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from scripts.tools import ROOT
from scripts.tools.bench.micro.wire.load import SHOWN, Load, Used

_WAIT_S = 60.0
_READ_BYTES = 1 << 18
_ENDS = (b"0\r\n\r\n", b"data: [DONE]\n\n")


class Server(NamedTuple):
    """A module that is run in a process of its own, and how it is asked for a stream."""

    module: str
    path: str
    body: str

    def request(self) -> bytes:
        """For a socket."""
        head = f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(self.body)}\r\n\r\n"
        return (head + self.body).encode()


class Flow(NamedTuple):
    """The cost of one load for one server: microseconds of CPU for each line, and lines per second."""

    handed_us: float
    written_us: float
    lines_per_s: float

    @property
    def used_us(self) -> float:
        """By all threads."""
        return self.handed_us + self.written_us

    @classmethod
    def of(cls, load: Load, used: Used, seconds: float) -> "Flow":
        """`seconds` is from the first line to the last."""
        lines = load.lines
        return cls(1e6 * used.handed_s / lines, 1e6 * used.written_s / lines, lines / seconds)


def measure(server: Server, load: Load) -> Flow:
    """Start it, read all streams, end it. ValueError when it does not do what it should."""
    command = [sys.executable, "-m", server.module, *load.words()]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            port = process.stdout.readline()
            if not port:
                raise ValueError(f"{server.module} did not start")
            seconds = _read(int(port), server.request(), load)
            used = Used(*json.loads(process.stdout.readline()))
            process.stdin.close()
            process.wait(_WAIT_S)
        finally:
            process.kill()
    return Flow.of(load, used, seconds)


def _read(port: int, request: bytes, load: Load) -> float:
    """Seconds from the first line to the last."""
    received: list[list[bytes]] = []
    first = last = 0.0
    with selectors.DefaultSelector() as selector:
        for _ in range(load.streams):
            client = socket.create_connection(("127.0.0.1", port), _WAIT_S)
            client.sendall(request)
            received.append([])
            selector.register(client, selectors.EVENT_READ, received[-1])
        try:
            while selector.get_map():
                ready = selector.select(_WAIT_S)
                if not ready:
                    raise ValueError("a stream stands still")
                for key, _ in ready:
                    assert isinstance(key.fileobj, socket.socket)
                    data = key.fileobj.recv(_READ_BYTES)
                    if SHOWN in data:
                        last = perf_counter()
                        first = first or last
                    key.data.append(data)
                    if not data or data.endswith(_ENDS):
                        selector.unregister(key.fileobj)
                        key.fileobj.close()
        finally:
            for key in list(selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
    _check(received, load.steps)
    return last - first


def _check(received: Sequence[Sequence[bytes]], lines: int) -> None:
    """Every stream got all its lines."""
    for parts in received:
        found = b"".join(parts).count(SHOWN)
        if found != lines:
            raise ValueError(f"{found} lines came instead of {lines}")
