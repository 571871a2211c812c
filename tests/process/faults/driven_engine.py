"""An engine over a tiny model, driven step by step on the test's thread through the workloads of `workloads.py`.

Only the thread, the event loop, the clock and the loading of weights are replaced; `Engine._step` runs unchanged.
Every answer is compared with that of the model without a cache, and the cache is checked whenever no request runs.
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
from tests.process.faults.drafts import draft_always
from tests.process.faults.workloads import PlannedRequest, Wave, expected

CHUNK = 24
CONTEXT = 4096
PLACES = 3
_TURNS = frozenset({1, 2})
_MOST_SLICES = 500
_SLICE_S, _GAP_S = 0.001, 0.003
"""The simulated duration of every slice, and the longest gap allowed between two tokens."""
_APART = 1  # slices between the arrivals of two requests of a wave


class Outcome(NamedTuple):
    """The text and the end that the client of one request received."""

    text: str
    end: Finished | Failed | None


@cache
def _tokenizer() -> Tokenizer:
    files = {
        "tokenizer.json": json.dumps(byte_level(ALL_BYTES[1 : VOCAB + 1])).encode(),
        "generation_config.json": b"{}",
    }
    return open_tokenizer(files.get)


class DrivenEngine:
    """One engine. Owner: the test, which acts as its thread and its event loop."""

    def __init__(self, kind: str, cache: str, budget_bytes: int | None = None, *, drafted: bool = False) -> None:
        """With `drafted`, most answers come in rounds of several tokens, some of them wrong."""
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
            draft="auto" if drafted else "off",
        )
        checkpoint = SimpleNamespace(draft_bytes=0)
        known = {"total_bytes": 0, "context_length": CONTEXT, "vocab_size": VOCAB, "has_vision": False}
        model = SimpleNamespace(name=kind, architecture=kind, checkpoint=checkpoint, **known)
        tokenizer: Future[Tokenizer] = Future()
        tokenizer.set_result(_tokenizer())
        self.engine = Engine(settings, cast("OpenedModel", model), tokenizer)
        self.engine._outbox = Outbox(cast("asyncio.AbstractEventLoop", _Loop()))
        loaded = LoadedModel(cast("Module", tiny(kind).model))
        with patch("runner.engine.assemble.load", lambda *_, **__: loaded):
            self.engine._load()
        self.running = self.engine.parts.scheduler
        self.running.matcher.lone_steps = 0  # so that short answers join batches, too
        if drafted:
            draft_always(self.running, kind)
        self.compared = 0
        self.most_together = 0
        """The number of rows of the largest forward."""
        self._clock = count()

    @property
    def cache(self) -> Cache:
        return self.running.cache

    def serve_one(self, planned: PlannedRequest) -> Outcome:
        """Serves one request. Raises the fault that ends the engine, if any."""
        return self.serve([planned])[0]

    def serve(self, wave: Wave) -> list[Outcome]:
        """Serves requests that arrive shortly after each other. Raises the fault that ends the engine, if any."""
        if len(wave) > 1:
            # Otherwise the workload would be over before the trial has shown that the model can be batched.
            while self.engine.parts.scheduler.matcher.untried:
                self.engine.parts.scheduler.matcher.advance()
        waiting, asked = list(wave), list[tuple[PlannedRequest, Request, int]]()
        with patch("runner.engine.scheduler.perf_counter", self._now), reported() as lines:
            for slices in range(_MOST_SLICES):
                if waiting and (slices % _APART == 0 or self.running.idle):
                    planned = waiting.pop(0)
                    asked.append((planned, _request(planned), slices))
                    self.engine.submit(asked[-1][1])
                self.engine._step()
                for planned, request, since in asked:
                    if planned.leave_after is not None and slices - since >= planned.leave_after:
                        request.cancel()
                self.most_together = max([self.most_together, *(len(group.generations) for group in self._groups)])
                if self.running.idle and not waiting:
                    break
            else:
                raise AssertionError("a request never ended")
        outcomes = [_outcome(request.stream._events) for _, request, _ in asked]
        for (_, request, _), outcome in zip(asked, outcomes, strict=True):
            assert lines[request] <= 1, "a request was logged twice"
            assert lines[request] or not isinstance(outcome.end, Finished)
        return outcomes

    def _now(self) -> float:
        return next(self._clock) * _SLICE_S

    @property
    def _groups(self) -> list[Batch]:
        return self.running.batches.all

    def check(self, planned: PlannedRequest, outcome: Outcome) -> None:
        """Checks that the client received one end and a right answer up to it, then checks the cache."""
        wanted = expected(self.kind, tuple(planned.prompt), planned.say)
        length = min(len(outcome.text), wanted.sure)
        assert outcome.text[:length] == wanted.text[:length]
        self.compared += length
        if isinstance(outcome.end, Finished):
            assert len(outcome.text) == planned.say
            assert outcome.end.metrics.prompt_eval_count == len(planned.prompt)
        else:
            assert isinstance(outcome.end, Failed) or planned.leave_after is not None
        self.check_cache()

    def check_cache(self) -> None:
        """Checks the invariants of docs/internals/cache.md, 1, which hold while no request runs."""
        assert self.running.idle
        assert not self.running._cache_invalid
        cache = self.cache
        if isinstance(cache, TrieCache):
            described = cache.describe()
            budget_bytes = described.counts.budget_bytes
            assert (described.sessions, described.reserved_bytes) == (0, 0)
            check_trie(cache)
            assert all(root.locks == 0 for root in cache.trie.roots.values())
            assert budget_bytes is None or cache.nbytes <= budget_bytes
            assert cache.nbytes == cache.sequences.kept.nbytes + described.counts.paged_bytes
        elif isinstance(cache, SingleEntryCache):
            assert not cache._open
            if cache.sequence is not None and cache.tokens:
                check_level(cache)
        else:
            assert isinstance(cache, NullCache)
            assert not cache._open
            assert cache.sequence is None

    def clear(self) -> None:
        """Clears the cache and checks that it holds nothing."""
        self.cache.clear()
        assert self.cache.nbytes == 0


def active_bytes() -> int:
    """Returns the bytes that MLX holds: weights, caches, and leaks."""
    mx.synchronize()  # pending computations hold their inputs
    gc.collect()
    return int(mx.get_active_memory())


def _request(planned: PlannedRequest) -> Request:
    sampling = SamplingOptions(logprobs=planned.logprobs, top_logprobs=2 if planned.logprobs else 0)
    return Request(prompt=list(planned.prompt), max_tokens=planned.say, sampling=sampling, stops=None, metered=False)


def _outcome(events: Sequence[Event]) -> Outcome:
    ends = [event for event in events if isinstance(event, Finished | Failed)]
    assert len(ends) <= 1
    assert not ends or events[-1] is ends[0]
    assert not events or [isinstance(event, Started) for event in events].count(True) == 1
    assert not events or isinstance(events[0], Started)
    text = "".join(event.text for event in events if isinstance(event, Text))
    return Outcome(text, ends[0] if ends else None)


class _Loop:
    """Calls immediately."""

    def call_soon_threadsafe(self, call: Callable[..., None], *arguments: object) -> None:
        call(*arguments)


@contextmanager
def reported() -> Iterator[Counter[Request]]:
    """Yields the number of log lines about the end of each request."""
    lines = Counter[Request]()
    original = lifecycle.report  # possibly with a fault injected by the test

    def counted(request: Request, session: LiveSession, ended: Lifecycle) -> None:
        lines[request] += 1
        original(request, session, ended)

    with patch.object(lifecycle, "report", counted):
        yield lines


@contextmanager
def last_layer(kind: str, hook: Callable[[int], None]) -> Iterator[None]:
    """Calls `hook` inside the block whenever a forward reaches its last layer, with the number of its rows."""
    last = tiny(kind).model.layers[-1]
    original: Callable[..., object] = type(last).__call__

    def watched(layer: object, x: mx.array, *arguments: object, **named: object) -> object:
        if layer is last:
            hook(x.shape[0])
        return original(layer, x, *arguments, **named)

    with patch.object(type(last), "__call__", watched):
        yield


@contextmanager
def close_checkpoints() -> Iterator[None]:
    """Spaces checkpoints for prompts of a hundred tokens instead of thousands."""
    checkpoints = partial(TurnCheckpoints, gap=3, first_distance=16, recent=3)
    with patch("runner.cache.checkpoints.TurnCheckpoints", lambda _: checkpoints(_TURNS)):
        yield
