"""An engine over a tiny model, driven by hand on the thread of the test, and a day of its life.

Nothing is left out but the thread, the event loop and the reading of weights: `Engine._step` runs as it stands. Every
answer is compared with what the model says without any cache, after every request what is held is checked.
"""

import asyncio
import gc
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast
from unittest.mock import patch

import mlx.core as mx
from mlx.nn.layers.base import Module

from runner.cache.interface import PrefixCache
from runner.cache.none import NullCache
from runner.cache.points import RestorePoints
from runner.cache.single import SingleEntryCache
from runner.cache.trie_cache import TrieCache
from runner.engine.engine import Engine
from runner.engine.events import Event, Failed, Finished, Outbox, Started, Text
from runner.engine.request import Request
from runner.model import OpenedModel
from runner.model.load import LoadedModel
from runner.sampling import SamplingOptions
from runner.settings import Settings
from runner.sizes import Bound
from runner.tokenizer import Tokenizer, open_tokenizer
from tests.cache.driver import ask_uncached, check_level, check_trie, largest
from tests.cache.tiny import VOCAB, tiny, words
from tests.models.tokenizers import ALL_BYTES, byte_level

CHUNK = 24
SAY = 4
CONTEXT = 4096
_TURNS = frozenset({1, 2})
_MOST_SLICES = 200


class Ask(NamedTuple):
    """A request of the day; `leave_after` so many slices its client goes away."""

    prompt: list[int]
    leave_after: int | None = None
    logprobs: bool = False


class Expected(NamedTuple):
    """What the model says without a cache, as text, and the first token that is no clear choice: from there on a
    rounding decides."""

    text: str
    sure: int


class Outcome(NamedTuple):
    """What the client of one request was told."""

    text: str
    end: Finished | Failed | None


@cache
def expected(kind: str, prompt: tuple[int, ...]) -> Expected:
    """The oracle."""
    model = tiny(kind)
    answer = ask_uncached(model, prompt, say=SAY)
    gaps = [largest(mx.diff(mx.sort(logits)[-2:])) for logits in answer.logits]
    sure = next((step for step, gap in enumerate(gaps) if gap <= model.tolerance), SAY)
    return Expected(spelled(answer.tokens), sure)


def spelled(tokens: Sequence[int]) -> str:
    """Token i is byte i + 1."""
    return bytes(token + 1 for token in tokens).decode()


def _tokens(text: str) -> list[int]:
    return [byte - 1 for byte in text.encode()]


@cache
def _tokenizer() -> Tokenizer:
    files = {
        "tokenizer.json": json.dumps(byte_level(ALL_BYTES[1 : VOCAB + 1])).encode(),
        "generation_config.json": b"{}",
    }
    return open_tokenizer(files.get)


@cache
def day(kind: str) -> tuple[Ask, ...]:
    """Ten requests: a conversation goes on, branches, is edited; a client leaves in the prefill and asks again, another
    one leaves in the answer; an answer is made anew; a prompt is longer than the budget."""
    first = words(50)
    said = _tokens(expected(kind, tuple(first)).text)
    second = [*first, *said, 1, *words(20, 2)]
    edited = list(second)
    edited[30] = (edited[30] + 5) % VOCAB
    other = words(60, 5)
    return (
        Ask(first),
        Ask(second),
        Ask([*first[:22], 2, *words(25, 3)]),
        Ask(edited),
        Ask(other, leave_after=2),
        Ask(other),
        Ask(second, logprobs=True),
        Ask([*other, *_tokens(expected(kind, tuple(other)).text), 2, 9], leave_after=4),
        Ask(words(150, 7)),
        Ask(first),
    )


class Bench:
    """One engine. Owner: the test, which is its thread and its event loop in one."""

    def __init__(self, kind: str, cache: str, budget_bytes: int | None = None) -> None:
        self.kind = kind
        settings = Settings(
            model=kind,
            port=0,
            models_dir=Path(),
            cache=cache,
            cache_memory=Bound(),
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
        with patch("runner.model.load.load", lambda _: loaded):
            self.engine._load()
        if budget_bytes is not None:
            self.engine._cache_bytes = budget_bytes
        self.engine._cache = self.engine._make_cache()
        self.compared = 0

    @property
    def cache(self) -> PrefixCache:
        return self.engine._cache

    def ask(self, ask: Ask) -> Outcome:
        """Serves one request. What ends the engine comes out of here."""
        sampling = SamplingOptions(logprobs=ask.logprobs, top_logprobs=2 if ask.logprobs else 0)
        request = Request(prompt=list(ask.prompt), max_tokens=SAY, sampling=sampling, stops=None, metered=False)
        self.engine.submit(request)
        for slices in range(_MOST_SLICES):
            self.engine._step()
            if self.engine._running is None:
                break
            if slices == ask.leave_after:
                request.cancel()
        else:
            raise AssertionError("the request never ended")
        return _outcome(request.stream._events)

    def check(self, ask: Ask, outcome: Outcome) -> None:
        """What a client was told is a right answer as far as it goes, and one end; what is held is as it must be."""
        wanted = expected(self.kind, tuple(ask.prompt))
        length = min(len(outcome.text), wanted.sure)
        assert outcome.text[:length] == wanted.text[:length]
        self.compared += length
        if isinstance(outcome.end, Finished):
            assert len(outcome.text) == SAY
            assert outcome.end.metrics.prompt_eval_count == len(ask.prompt)
        else:
            assert isinstance(outcome.end, Failed) or ask.leave_after is not None
        self.check_cache()

    def check_cache(self) -> None:
        """Design, section 5, between two requests."""
        assert self.engine._running is None
        assert not self.engine._spoiled
        cache = self.cache
        if isinstance(cache, TrieCache):
            assert not cache._open
            check_trie(cache)
            assert all(root.locks == 0 for root in cache._trie._roots.values())
            assert cache._budget is None or cache.nbytes <= cache._budget
            assert cache.nbytes == cache._stack.nbytes + cache._stack.ledger.nbytes
        elif isinstance(cache, SingleEntryCache):
            assert not cache._open
            if cache._stack is not None and cache._tokens:
                check_level(cache)
        else:
            assert isinstance(cache, NullCache)
            assert not cache._open
            assert cache._stack is None

    def clear(self) -> None:
        """Forgets everything; nothing is held then."""
        self.cache.clear()
        assert self.cache.nbytes == 0


def active_bytes() -> int:
    """What MLX holds: weights, what caches keep, and what was lost sight of."""
    mx.synchronize()  # what is still being computed is held until it is
    gc.collect()
    return int(mx.get_active_memory())


def _outcome(events: Sequence[Event]) -> Outcome:
    ends = [event for event in events if isinstance(event, Finished | Failed)]
    assert len(ends) <= 1
    assert not ends or events[-1] is ends[0]
    started = [event for event in events if isinstance(event, Started)]
    assert len(started) == 1 or isinstance(events[0], Failed)
    text = "".join(event.text for event in events if isinstance(event, Text))
    return Outcome(text, ends[0] if ends else None)


class _Loop:
    """Calls at once."""

    def call_soon_threadsafe(self, call: Callable[..., None], *arguments: object) -> None:
        call(*arguments)


@contextmanager
def last_layer(kind: str, hook: Callable[[], None]) -> Iterator[None]:
    """Inside the block `hook` is called where a forward reaches the last layer, when the others are done."""
    last = tiny(kind).model.layers[-1]
    original: Callable[..., object] = type(last).__call__

    def watched(layer: object, *arguments: object, **named: object) -> object:
        if layer is last:
            hook()
        return original(layer, *arguments, **named)

    with patch.object(type(last), "__call__", watched):
        yield


@contextmanager
def close_restore_points() -> Iterator[None]:
    """Restore points for prompts of a hundred tokens in place of thousands."""
    points = partial(RestorePoints, gap=3, first_distance=16, recent=3)
    with patch("runner.cache.points.RestorePoints", lambda _: points(_TURNS)):
        yield
