"""Asks a server for its status again and again: `python -m scripts.tools.bench.polling PORT PATH COUNT INTERVAL_S`.

In a process of its own, so that nothing but the server and the system makes it wait. Prints `Waits` as JSON.
"""

import json
import socket
import sys
from time import perf_counter, sleep
from typing import NamedTuple

PATIENCE_S = 30.0
_READ_BYTES = 65536


class Waits(NamedTuple):
    """Seconds from the request to the whole answer: on one connection that is kept, which not every server does, and
    each on a fresh one, as hosts ask."""

    kept: list[float]
    fresh: list[float]


def poll(port: int, path: str, count: int, interval_s: float) -> Waits:
    """So many of both kinds, in turns. OSError when the server does not answer."""
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    waits = Waits([], [])
    kept: socket.socket | None = _connect(port)
    with _connect(port) as probe:
        if _ask(probe, request):
            kept = None
    due = perf_counter()
    for number in range(2 * count):
        due = max(due + interval_s, perf_counter())
        sleep(max(0.0, due - perf_counter()))
        asked = perf_counter()
        if number % 2:
            with _connect(port) as fresh:
                _ask(fresh, request)
                waits.fresh.append(perf_counter() - asked)
        elif kept is not None:
            _ask(kept, request)
            waits.kept.append(perf_counter() - asked)
    return waits


def _connect(port: int) -> socket.socket:
    connected = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def _ask(connected: socket.socket, request: bytes) -> bool:
    """Returns whether the answer ended with the connection."""
    connected.sendall(request)
    answer = b""
    while True:
        data = connected.recv(_READ_BYTES)
        answer += data
        head, found, body = answer.partition(b"\r\n\r\n")
        if found and b" 200 " not in head.partition(b"\r\n")[0]:
            raise ConnectionError(f"the status is refused: {head!r}")
        if not data:
            if not found:
                raise ConnectionError("a connection was closed without an answer")
            return True
        for line in head.split(b"\r\n") if found else ():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length" and len(body) >= int(value):
                return False


if __name__ == "__main__":
    _port, _path, _count, _interval_s = sys.argv[1:]
    print(json.dumps(poll(int(_port), _path, int(_count), float(_interval_s))))
