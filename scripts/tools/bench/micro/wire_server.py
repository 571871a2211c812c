"""The runner's app over an engine without a model: `python -m scripts.tools.bench.micro.wire_server`.

Prints its port, waits for as many requests as the load has streams, and sends each of them one word a step through the
real outbox. Then prints the CPU seconds that this took.
"""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, process_time, sleep, thread_time
from typing import NamedTuple, cast

from aiohttp import web

from protocol import DoneReason, Metrics
from runner.engine.engine import Engine
from runner.engine.events import Event, EventStream, Finished, Outbox, Started, Text
from runner.engine.pictures.support import NoPictures
from runner.engine.platform.wakeup import Wakeup
from runner.engine.request import Limits, Request
from runner.server.app import make_app
from runner.tokenizer import open_tokenizer
from scripts.tools.models.tokenizers import byte_level

WORD = " word"
_CONTEXT_TOKENS = 4096
_VOCABULARY = 512
_SETTLE_S = 0.1


class Load(NamedTuple):
    """Each stream gets `steps` lines, one every `interval_s`; with 0 as fast as possible."""

    streams: int
    steps: int
    interval_s: float

    @classmethod
    def of(cls, words: Sequence[str]) -> "Load":
        """Reads it from a command line."""
        streams, steps, interval_s = words
        return cls(int(streams), int(steps), float(interval_s))


class Used(NamedTuple):
    """CPU seconds: `handed_s` of the engine's thread, to hand lines over; `written_s` of all others, to write them."""

    handed_s: float
    written_s: float


def feed(load: Load, send: Callable[[], None], drain: Callable[[], None]) -> None:
    """Sends one word a step, then prints the CPU seconds that this took. `drain` waits until all words are written."""
    handed_s, step_at = 0.0, perf_counter()
    whole, own = process_time(), thread_time()
    for _ in range(load.steps):
        if load.interval_s:
            step_at += load.interval_s
            sleep(max(0.0, step_at - perf_counter()))
        begun = thread_time()
        send()
        handed_s += thread_time() - begun
    drain()
    own_s = thread_time() - own
    print(json.dumps(Used(handed_s, process_time() - whole - own_s)), flush=True)


class _Feeder:
    """Stands in for the engine: a thread that sends all streams one word a step."""

    def __init__(self, load: Load, loop: asyncio.AbstractEventLoop) -> None:
        files = {"tokenizer.json": json.dumps(byte_level()).encode(), "config.json": b"{}"}
        self.tokenizer = open_tokenizer(files.get)
        self.limits = Limits(_CONTEXT_TOKENS, _VOCABULARY)
        self.pictures = NoPictures()
        self.memory_bytes = 0
        self._load = load
        self._loop = loop
        self._outbox = Outbox(loop, Wakeup(loop).wake)
        self._streams: list[EventStream] = []

    def submit(self, request: Request) -> None:
        """Takes a request; the last one starts the load."""
        self._streams.append(request.stream)
        if len(self._streams) == self._load.streams:
            threading.Thread(target=self._run, name="engine", daemon=True).start()

    def _run(self) -> None:
        self._send(Started())
        sleep(_SETTLE_S)
        feed(self._load, lambda: self._send(Text(WORD, [], None)), self._drain)
        self._send(Finished(DoneReason.LENGTH, Metrics()))

    def _send(self, event: Event) -> None:
        for stream in self._streams:
            self._outbox.put(stream, event)
        self._outbox.send()

    def _drain(self) -> None:
        """Waits until the event loop has taken all that was sent before."""
        drained = threading.Event()
        self._loop.call_soon_threadsafe(drained.set)
        drained.wait()


async def _serve(load: Load) -> None:
    app = make_app(cast("Engine", _Feeder(load, asyncio.get_running_loop())), ThreadPoolExecutor(1))
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the benchmark closes it
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(_serve(Load.of(sys.argv[1:])))
