"""The real app over an engine without a model: `python -m scripts.tools.bench.micro.wire.ours`, a process of its own.

It prints its port, takes as many requests as there are streams, and feeds them through the real outbox.
"""

import asyncio
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from aiohttp import web

from protocol import DoneReason, Metrics
from runner.engine.engine import Engine
from runner.engine.events import Event, EventStream, Finished, Outbox, Started, Text
from runner.engine.platform.wakeup import Wakeup
from runner.engine.request import Limits, Request
from runner.server.app import make_app
from runner.tokenizer import open_tokenizer
from scripts.tools.bench.micro.wire.load import WORD, Load, feed, wait_for_end
from scripts.tools.models.tokenizers import byte_level

_CONTEXT_TOKENS = 4096
_VOCABULARY = 512


class _Feeder:
    """Stands in for the engine: a thread that tells all streams one word a step."""

    def __init__(self, load: Load, loop: asyncio.AbstractEventLoop) -> None:
        files = {"tokenizer.json": json.dumps(byte_level()).encode(), "config.json": b"{}"}
        self.tokenizer = open_tokenizer(files.get)
        self.limits = Limits(_CONTEXT_TOKENS, _VOCABULARY)
        self.memory_bytes = 0
        self._load = load
        self._loop = loop
        self._outbox = Outbox(loop, Wakeup(loop).wake)
        self._streams: list[EventStream] = []

    def submit(self, request: Request) -> None:
        """The last of the streams lets all of them begin."""
        self._streams.append(request.stream)
        if len(self._streams) == self._load.streams:
            threading.Thread(target=self._live, name="engine", daemon=True).start()

    def _live(self) -> None:
        self._tell(Started())
        feed(self._load, lambda: self._tell(Text(WORD, [], None)), self._drain)
        self._tell(Finished(DoneReason.LENGTH, Metrics()))

    def _tell(self, event: Event) -> None:
        for stream in self._streams:
            self._outbox.put(stream, event)
        self._outbox.send()

    def _drain(self) -> None:
        drained = threading.Event()
        self._loop.call_soon_threadsafe(drained.set)  # comes after what was sent
        drained.wait()


async def _serve(load: Load) -> None:
    app = make_app(cast("Engine", _Feeder(load, asyncio.get_running_loop())), ThreadPoolExecutor(1))
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(wait_for_end)


if __name__ == "__main__":
    asyncio.run(_serve(Load.of(sys.argv[1:])))
