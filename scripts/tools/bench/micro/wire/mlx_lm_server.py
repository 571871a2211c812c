"""mlx-lm's own server over a thread that computes nothing: `python -m scripts.tools.bench.micro.wire.mlx_lm_server`.

Its handlers and queues are its own; only the thread behind them is ours, and tells every stream one word a step.
"""

import importlib
import sys
import threading
from http.server import ThreadingHTTPServer
from queue import Queue
from time import sleep
from types import SimpleNamespace
from typing import Any

from scripts.tools.bench.micro.wire.load import WORD, Load, feed, wait_for_end

server: Any = importlib.import_module("mlx_lm.server")  # whose types say little
_DRAIN_S = 0.001


class _Feeder(server.ResponseGenerator):  # type: ignore[misc]
    """Its thread, which began when the feeder was made."""

    load: Load

    def _generate(self) -> None:
        queues: list[Queue[Any]] = []
        machine = server.TextStateMachine(None)
        while len(queues) < self.load.streams:
            queue, _, _ = self.requests.get()
            context = server.GenerationContext(False, False, None, machine, "normal", [1])
            queue.put(context)
            queues.append(queue)

        def tell(word: str, reason: str | None) -> None:
            for queue in queues:
                queue.put(server.Response(word, 1, 0.0, reason, ()))

        def drain() -> None:
            while any(queue.qsize() for queue in queues):
                sleep(_DRAIN_S)
            sleep(10 * _DRAIN_S)

        feed(self.load, lambda: tell(WORD, None), drain)
        tell("", "length")
        for queue in queues:
            queue.put(None)


class _Handler(server.APIHandler):  # type: ignore[misc]
    """Its own, but without a log."""

    def log_message(self, *words: object) -> None:
        pass


def _serve(load: Load) -> None:
    _Feeder.load = load
    options = SimpleNamespace(
        allowed_origins=["*"], num_draft_tokens=0, max_tokens=1, temp=0.0, top_p=1.0, top_k=0, min_p=0.0
    )
    feeder = _Feeder(SimpleNamespace(cli_args=options), server.LRUPromptCache())

    def handle(*words: object) -> _Handler:
        return _Handler(feeder, *words, system_fingerprint="bench")

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), handle)
    print(httpd.server_port, flush=True)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()


if __name__ == "__main__":
    _serve(Load.of(sys.argv[1:]))
    wait_for_end()
