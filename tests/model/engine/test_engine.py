"""An engine with one place: it runs requests in order, slice by slice, and no request affects the next."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from pathlib import Path

import mlx.core as mx
import pytest

from runner import build
from runner.engine import events as wakeup
from runner.engine.engine import Engine
from runner.engine.events import Event, Failed, Finished, Text
from runner.engine.generation import Generation
from runner.engine.parts import Parts
from runner.engine.request import Request
from runner.model import open_model
from runner.sampling import SamplingOptions
from runner.settings import Settings
from runner.tokenizer import Tokenizer, open_tokenizer
from scripts.tools.models.scripted import BYTES, write_scripted

CHUNK = 64
SUCCESSOR = {byte: (byte + 1) % 256 for byte in range(256)}
END = ord("z")


class Watched:
    """Wraps the model's forward: counts the calls, and can hold or break the next ones."""

    def __init__(self, forward: Callable[[mx.array, list[object]], mx.array]) -> None:
        self.lengths: list[int] = []
        self.on_call: Callable[[], None] = lambda: None
        self._forward = forward

    def __call__(self, tokens: mx.array, layers: list[object]) -> mx.array:
        self.lengths.append(tokens.shape[1])
        self.on_call()
        return self._forward(tokens, layers)


@pytest.fixture
async def engine(tmp_path: Path) -> Engine:
    """Returns a loaded engine whose model answers with the bytes that follow the prompt's last one, up to `z`."""
    return await loaded(tmp_path)


async def loaded(tmp_path: Path, parallel: int = 1, draft: str = "off") -> Engine:
    """Returns an engine as above; without drafts, where tests count steps."""
    directory = write_scripted(tmp_path / "model", BYTES, SUCCESSOR, [END])
    return await started(directory, prefill_chunk_tokens=CHUNK, parallel=parallel, draft=draft)


async def started(directory: Path, *, ends: bool = True, **choices: object) -> Engine:
    """Returns a loaded engine with these settings; without `ends` its answers end by their length alone."""
    settings = Settings(
        model=str(directory), port=0, models_dir=directory, cache="trie", blas="auto", blas_threads=1,
        log_level=20, watch_parent=False, **choices,  # type: ignore[arg-type]
    )  # fmt: skip
    model = open_model(settings.model, settings.models_dir)
    tokenizer: Future[Tokenizer] = Future()
    tokenizer.set_result(open_tokenizer(model.file))
    if not ends:
        tokenizer.result().eos = frozenset()
    engine = Engine(settings, model, tokenizer, build)
    await asyncio.wait_for(engine.start(asyncio.get_running_loop()).wait(), 30)
    return engine


@pytest.fixture
async def watched(engine: Engine) -> Watched:
    engine.parts.forward = watched = Watched(engine.parts.forward)
    engine.parts.step = None
    return watched


def request(prompt: bytes = b"a", max_tokens: int = 100) -> Request:
    return Request(prompt=list(prompt), max_tokens=max_tokens, sampling=SamplingOptions(), stops=None, metered=False)


async def events(request: Request) -> list[Event]:
    """Returns all events up to the end of a request."""
    told: list[Event] = []
    while not told or not isinstance(told[-1], Finished | Failed):
        told += await asyncio.wait_for(request.stream.batch(), 30)
    return told


def text(told: list[Event]) -> str:
    return "".join(event.text for event in told if isinstance(event, Text))


@pytest.mark.parametrize("fail_at", [1, 3, 4, 8])
async def test_a_fault_ends_its_own_request_and_nothing_else(engine: Engine, watched: Watched, fail_at: int) -> None:
    def fail() -> None:
        if len(watched.lengths) == fail_at:
            raise ValueError("broken on purpose")

    watched.on_call = fail
    bad, good = request(b"x" * (2 * CHUNK) + b"a"), request(b"x" * (2 * CHUNK) + b"a")
    engine.submit(bad)
    engine.submit(good)
    end = (await events(bad))[-1]
    assert end == Failed("ValueError: broken on purpose")
    assert text(await events(good)) == "bcdefghijklmnopqrstuvwxy"


async def test_the_events_of_a_slice_wake_the_loop_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    wake_ups = 0
    write = wakeup._write

    def count(end: int, data: bytes, size: int) -> int:
        nonlocal wake_ups
        wake_ups += 1
        return int(write(end, data, size))

    receive = engine._receive

    def receive_late() -> None:
        until = time.monotonic() + 10
        while engine._outbox._woken and time.monotonic() < until:  # lest the loop takes the events of several slices
            time.sleep(0.001)
        receive()

    monkeypatch.setattr(wakeup, "_write", count)
    monkeypatch.setattr(engine, "_receive", receive_late)
    asked = request(max_tokens=20)
    engine.submit(asked)
    told = await events(asked)
    assert len(told) == 22
    assert wake_ups == 21  # the start, each token; the end comes with the last token


async def test_a_client_is_told_of_the_end_before_the_cache_waits_for_the_last_forward(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[int] = []
    close = Generation.close

    def closing(generation: Generation) -> None:
        waiting.append(len(engine._outbox._pending))
        close(generation)

    monkeypatch.setattr(Generation, "close", closing)
    asked = request()
    engine.submit(asked)
    await events(asked)
    async with asyncio.timeout(30):
        while not waiting:
            await asyncio.sleep(0.001)
    assert waiting == [0]


async def test_memory_is_published_again_with_every_slice(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, since what other tests left may be freed meanwhile."""
    numbers, slices, advance = count(1), list[None](), engine.parts.scheduler.compute_slice
    monkeypatch.setattr(engine.parts.scheduler, "compute_slice", lambda: slices.append(advance()))
    monkeypatch.setattr("runner.engine.engine._PUBLISH_S", 0.0)
    monkeypatch.setattr(engine, "_publish_at", 0.0)
    monkeypatch.setattr(Parts, "held_bytes", property(lambda _: (next(numbers), 0)))
    asked = request(b"x" * (40 * CHUNK))
    engine.submit(asked)
    await events(asked)
    assert engine.memory_bytes >= len(slices) > 10
