"""The least that a server in Python with two threads can do: `python -m scripts.tools.bench.micro.wire.bare_sockets`.

One thread wakes another one by a byte over a pair of sockets; that waits for it, and sends each client the same bytes.
No HTTP is parsed, nothing is encoded, and no line is kept.
"""

import select
import socket
import sys
import threading
from time import sleep

from scripts.tools.bench.micro.wire.load import WORD, Load, feed, wait_for_end

_LINE = b'{"Content":"%b","Done":false}\n' % WORD.encode()
_CHUNK = b"%x\r\n%b\r\n" % (len(_LINE), _LINE)
_DRAIN_S = 0.001


def _serve(load: Load) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    clients = [listener.accept()[0] for _ in range(load.streams)]
    for client in clients:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.recv(65536)
        client.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        client.setblocking(False)
    waking, woken = socket.socketpair()
    woken.setblocking(False)
    poll = select.poll()  # what selectors are made of
    poll.register(woken, select.POLLIN)
    left = load.steps

    def drain() -> None:
        while left:
            sleep(_DRAIN_S)

    threading.Thread(target=feed, args=(load, lambda: waking.send(b"\0"), drain), daemon=True).start()
    while left:
        poll.poll()
        steps = len(woken.recv(4096))
        for client in clients:
            client.send(_CHUNK * steps)
        left -= steps
    for client in clients:
        client.send(b"0\r\n\r\n")


if __name__ == "__main__":
    _serve(Load.of(sys.argv[1:]))
    wait_for_end()
