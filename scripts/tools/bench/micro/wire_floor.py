"""The least that lines can cost in Python: `python -m scripts.tools.bench.micro.wire_floor`, as `wire_server`.

One thread hands a word over and wakes the other, which writes it to every socket: no event loop, no HTTP but the
bytes, no request to look after.
"""

import os
import socket
import sys
import threading
from collections import deque

from scripts.tools.bench.micro.wire_server import WORD, Load, feed

_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
_LINE = f'{{"content":"{WORD}"}}\n'.encode()
_CHUNK = b"%x\r\n%s\r\n" % (len(_LINE), _LINE)
_END = b"0\r\n\r\n"


def _serve(load: Load) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=load.streams) as listener:
        print(listener.getsockname()[1], flush=True)
        clients = [listener.accept()[0] for _ in range(load.streams)]
    for client in clients:
        client.recv(4096)
        client.sendall(_HEAD)
    waiting: deque[bytes | threading.Event] = deque()
    woken, wake = socket.socketpair()

    def hand_over(item: bytes | threading.Event) -> None:
        waiting.append(item)
        wake.send(b"\0")

    def drain() -> None:
        hand_over(drained := threading.Event())
        drained.wait()

    def run() -> None:
        feed(load, lambda: hand_over(_CHUNK), drain)
        hand_over(_END)

    threading.Thread(target=run, daemon=True).start()
    item: bytes | threading.Event = _CHUNK
    while item is not _END:
        woken.recv(4096)
        while waiting:
            item = waiting.popleft()
            if isinstance(item, threading.Event):
                item.set()
                continue
            for client in clients:
                client.sendall(item)
    sys.stdin.read()  # until the benchmark closes it
    os._exit(0)


if __name__ == "__main__":
    _serve(Load.of(sys.argv[1:]))
