"""An engine over a tiny model, driven by hand on the thread of the test, through the days of `days.py`.

Nothing is left out but the thread, the event loop, the clock and the reading of weights: `Engine._step` runs as it
stands. Every answer is compared with what the model says without any cache; whenever nothing runs what is held is
checked.
"""

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast
from unittest.mock import patch

import mlx.core as mx
from mlx.nn.layers.base import Module

from runner.cache.checkpoints import TurnCheckpoints
from runner.cache.interface import Cache
from runner.cache.none import NullCache
from runner.cache.session import LiveSession
from runner.cache.single import SingleEntryCache
from runner.cache.trie_cache import TrieCache
from runner.engine import lifecycle
from runner.engine.batch import Batch
from runner.engine.engine import Engine
from runner.engine.events import Event, Failed, Finished, Outbox, Started, Text
from runner.engine.lifecycle import Lifecycle
from runner.engine.request import Request
from runner.model import OpenedModel
from runner.model.weights.load import LoadedModel
from runner.sampling import SamplingOptions
from runner.settings import Settings
from runner.sizes import Bound
from runner.tokenizer import Tokenizer, open_tokenizer
from scripts.tools.models.tiny import VOCAB, tiny
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level
from tests.lib.driver import check_level, check_trie
from tests.process.faults.days import Ask, Wave, expected

CHUNK = 24
CONTEXT = 4096
PLACES = 3
_TURNS = frozenset({1, 2})
_MOST_SLICES = 500
_SLICE_S, _GAP_S = 0.001, 0.003
"""How long every slice takes, and how long an answer may be held up."""
_APART = 1  # slices between two requests that come together


class Outcome(NamedTuple):
    """What the client of one request was told."""

    text: str
    end: Finished | Failed | None


@cache
def _tokenizer() -> Tokenizer:
    files = {
        "tokenizer.json": json.dumps(byte_level(ALL_BYTES[1 : VOCAB + 1])).encode(),
        "generation_config.json": b"{}",
    }
    return open_tokenizer(files.get)


class Bench:
    """One engine. Owner: the test, which is its thread and its event loop in one."""

    def __init__(self, kind: str, cache: str, budget_bytes: int | None = None) -> None:
        self.kind = kind
        settings = Settings(
            model=kind,
            port=0,
            models_dir=Path(),
            cache=cache,
            cache_memory=Bound(bytes=budget_bytes),
            parallel=PLACES,
            max_gap_s=_GAP_S,
            prefill_chunk_tokens=CHUNK,
            blas="auto",
            blas_threads=1,
            log_level=20,
            watch_parent=False,
        )
        model = SimpleNamespace(name=kind, architecture=kind, total_bytes=0, context_length=CONTEXT, vocab_size=VOCAB)
        tokenizer: Future[Tokenizer] = Future()
        tokenizer.set_result(_tokenizer())
        self.engine = Engine(settings, cast("OpenedModel", model), tokenizer)
        self.engine._outbox = Outbox(cast("asyncio.AbstractEventLoop", _Loop()))
        loaded = LoadedModel(cast("Module", tiny(kind).model))
        with patch("runner.engine.assemble.load", lambda *_: loaded):
            self.engine._load()
        self.running = self.engine._parts.scheduler
        self.running.matcher.lone_steps = 0  # so that short answers join, too
        self.compared = 0
        self.most_together = 0
        """Rows of the largest forward."""
        self._clock = count()

    @property
    def cache(self) -> Cache:
        return self.running.cache

    def ask(self, ask: Ask) -> Outcome:
        """Serves one request. What ends the engine comes out of here."""
        return self.serve([ask])[0]

    def serve(self, wave: Wave) -> list[Outcome]:
        """Serves these, which come one shortly after the other. What ends the engine comes out of here."""
        if len(wave) > 1:
            while (
                self.engine._parts.scheduler.matcher.untried
            ):  # else a day would be over before it is known who may be joined
                self.engine._parts.scheduler.matcher.advance()
        waiting, asked = list(wave), list[tuple[Ask, Request, int]]()
        with patch("runner.engine.scheduler.perf_counter", self._now), reported() as lines:
            for slices in range(_MOST_SLICES):
                if waiting and (slices % _APART == 0 or self.running.idle):
                    ask = waiting.pop(0)
                    asked.append((ask, _request(ask), slices))
                    self.engine.submit(asked[-1][1])
                self.engine._step()
                for ask, request, since in asked:
                    if ask.leave_after is not None and slices - since >= ask.leave_after:
                        request.cancel()
                self.most_together = max([self.most_together, *(len(group.generations) for group in self._groups)])
                if self.running.idle and not waiting:
                    break
            else:
                raise AssertionError("a request never ended")
        outcomes = [_outcome(request.stream._events) for _, request, _ in asked]
        for (_, request, _), outcome in zip(asked, outcomes, strict=True):
            assert lines[request] <= 1, "a request is told of twice in the log"
            assert lines[request] or not isinstance(outcome.end, Finished)
        return outcomes

    def _now(self) -> float:
        return next(self._clock) * _SLICE_S

    @property
    def _groups(self) -> list[Batch]:
        return self.running.batches.all

    def check(self, ask: Ask, outcome: Outcome) -> None:
        """What a client was told is a right answer as far as it goes, and one end; what is held is as it must be."""
        wanted = expected(self.kind, tuple(ask.prompt), ask.say)
        length = min(len(outcome.text), wanted.sure)
        assert outcome.text[:length] == wanted.text[:length]
        self.compared += length
        if isinstance(outcome.end, Finished):
            assert len(outcome.text) == ask.say
            assert outcome.end.metrics.prompt_eval_count == len(ask.prompt)
        else:
            assert isinstance(outcome.end, Failed) or ask.leave_after is not None
        self.check_cache()

    def check_cache(self) -> None:
        """The invariants of docs/internals/cache.md, 1, while nothing runs."""
        assert self.running.idle
        assert not self.running._cache_invalid
        cache = self.cache
        if isinstance(cache, TrieCache):
            described = cache.describe()
            budget_bytes = described.counts.budget_bytes
            assert (described.sessions, described.reserved_bytes) == (0, 0)
            check_trie(cache)
            assert all(root.locks == 0 for root in cache._trie._roots.values())
            assert budget_bytes is None or cache.nbytes <= budget_bytes
            assert cache.nbytes == cache._sequences.kept.nbytes + described.counts.paged_bytes
        elif isinstance(cache, SingleEntryCache):
            assert not cache._open
            if cache._sequence is not None and cache._tokens:
                check_level(cache)
        else:
            assert isinstance(cache, NullCache)
            assert not cache._open
            assert cache._sequence is None

    def clear(self) -> None:
        """Forgets everything; nothing is held then."""
        self.cache.clear()
        assert self.cache.nbytes == 0


def active_bytes() -> int:
    """What MLX holds: weights, what caches keep, and what was lost sight of."""
    mx.synchronize()  # what is still being computed is held until it is
    gc.collect()
    return int(mx.get_active_memory())


def _request(ask: Ask) -> Request:
    sampling = SamplingOptions(logprobs=ask.logprobs, top_logprobs=2 if ask.logprobs else 0)
    return Request(prompt=list(ask.prompt), max_tokens=ask.say, sampling=sampling, stops=None, metered=False)


def _outcome(events: Sequence[Event]) -> Outcome:
    ends = [event for event in events if isinstance(event, Finished | Failed)]
    assert len(ends) <= 1
    assert not ends or events[-1] is ends[0]
    assert not events or [isinstance(event, Started) for event in events].count(True) == 1
    assert not events or isinstance(events[0], Started)
    text = "".join(event.text for event in events if isinstance(event, Text))
    return Outcome(text, ends[0] if ends else None)


class _Loop:
    """Calls at once."""

    def call_soon_threadsafe(self, call: Callable[..., None], *arguments: object) -> None:
        call(*arguments)


@contextmanager
def reported() -> Iterator[Counter[Request]]:
    """Counts for each request the lines that tell of its end in the log."""
    lines = Counter[Request]()
    original = lifecycle.report  # which a test may have broken

    def counted(request: Request, session: LiveSession, ended: Lifecycle) -> None:
        lines[request] += 1
        original(request, session, ended)

    with patch.object(lifecycle, "report", counted):
        yield lines


@contextmanager
def last_layer(kind: str, hook: Callable[[int], None]) -> Iterator[None]:
    """Inside the block `hook` is called where a forward reaches the last layer, when the others are done, with the
    number of its rows."""
    last = tiny(kind).model.layers[-1]
    original: Callable[..., object] = type(last).__call__

    def watched(layer: object, x: mx.array, *arguments: object, **named: object) -> object:
        if layer is last:
            hook(x.shape[0])
        return original(layer, x, *arguments, **named)

    with patch.object(type(last), "__call__", watched):
        yield


@contextmanager
def close_restore_points() -> Iterator[None]:
    """Restore points for prompts of a hundred tokens in place of thousands."""
    points = partial(TurnCheckpoints, gap=3, first_distance=16, recent=3)
    with patch("runner.cache.checkpoints.TurnCheckpoints", lambda _: points(_TURNS)):
        yield
