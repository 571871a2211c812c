"""Faults while several requests run: each ends the request that it concerns, if any, and leaves the others as they are.

One story for every fault: three requests begin, are prefilled in slices, join, decode in one batch, leave it and close;
then two of the prompts are sent again. The fault is an exception in the k-th call of a function, for k = 0, 1, 2, 4, 7,
... until the story has no k-th call; in slow tests for every k.
"""

import logging
from contextlib import AbstractContextManager
from typing import NamedTuple

import mlx.core as mx
import pytest

from runner.cache.layers.batched import BatchedLayers
from runner.cache.sequence import SequenceLayers
from runner.cache.session import DecodeRows, Session
from runner.cache.trie import PrefixTrie
from runner.cache.trie_cache import TrieCache
from runner.engine.events import Failed
from runner.engine.generation import Generation
from runner.engine.policy import SlicePolicy
from runner.sampling.sample import SampledTokens
from runner.sampling.sampler import Sampler, SamplerBatch
from runner.tokenizer import Tokenizer
from runner.tokenizer.detokenizer import Detokenizer
from scripts.tools.models.tiny import KINDS, words
from tests.lib.breaking import breaking
from tests.lib.tiny_engine import TinyEngine

FIRST, SECOND, THIRD = words(41, 1), [*words(33, 1), 9, 9, 9, 9], words(20, 3)


class Place(NamedTuple):
    """A function that raises, and the number of requests that this may end."""

    where: object
    name: str
    most: int

    def breaking(self, at: int) -> AbstractContextManager[list[int]]:
        return breaking(self.where, self.name, at)

    def __str__(self) -> str:
        return f"{getattr(self.where, '__name__', '')}.{self.name}"


ANSWERS = [
    Place(TrieCache, "begin", 1),
    Place(Generation, "__init__", 1),
    Place(Sampler, "__init__", 1),
    Place(Sampler, "__call__", 1),
    Place(Detokenizer, "push", 1),
    Place(Detokenizer, "finish", 1),
    Place(Tokenizer, "token_text", 1),
    Place(Session, "record", 1),
    Place(SampledTokens, "read", 1),
    Place(mx, "eval", 1),
    Place(mx, "async_eval", 1),
    Place(SequenceLayers, "count_forward", 1),
    Place(Generation, "close", 0),
]
"""Functions that concern one request."""

BATCHES = [
    Place(DecodeRows, "join", 0),
    Place(DecodeRows, "make_room", 0),
    Place(DecodeRows, "settle", 1),
    Place(Session, "absorb", 1),
    Place(SequenceLayers, "absorb", 1),
    Place(BatchedLayers, "__init__", 0),
    Place(BatchedLayers, "extend", 0),
    Place(BatchedLayers, "keep", 0),
    Place(SampledTokens, "joined", 0),
    Place(SampledTokens, "take", 0),
    Place(SamplerBatch, "__init__", 0),
    Place(SamplerBatch, "__call__", 0),
    Place(SamplerBatch, "release", 0),
]
"""Functions that concern a batch: each request can go on alone, except one that cannot take up its own layers."""

CACHES = [
    Place(TrieCache, "_follows", 0),
    Place(TrieCache, "_resume", 0),
    Place(TrieCache, "_store", 0),
    Place(TrieCache, "enforce_budget", 1),
    Place(TrieCache, "_close", 0),
    Place(PrefixTrie, "extend", 1),
    Place(PrefixTrie, "match", 1),
    Place(PrefixTrie, "merge_needless", 0),
    Place(SequenceLayers, "evaluate", 1),
    Place(SequenceLayers, "rewind", 0),
]
"""Functions of the cache on which no running answer depends."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Silences the log: the tracebacks of faults would take longer than the rest."""
    caplog.set_level(logging.CRITICAL)


def story(name: str, breaks_at: int = -1) -> TinyEngine:
    """Runs the three to their ends: the second shares a prefix with the first, the third comes later.
    `breaks_at` is the number of a forward that breaks, from 0."""
    engine = TinyEngine(name, SlicePolicy(16, 0.1))
    engine.forward.breaks = lambda rows, length: len(engine.forward.calls) == breaks_at + 1
    engine.ask(FIRST, 14, logprobs=True, top_logprobs=2)
    engine.ask(SECOND, 6, temperature=0.9, seed=3, repeat_penalty=1.2, repeat_last_n=16)
    engine.advance(7)
    engine.ask(THIRD, 9, temperature=0.9, seed=4, top_k=20, metered=True)
    engine.finish()
    return engine


def go_on(engine: TinyEngine) -> None:
    """Checks that the engine serves later requests, and that its cache gives right answers."""
    engine.check()
    later = [engine.ask([*FIRST, 7], 5), engine.ask(SECOND, 5, temperature=1, seed=1)]
    engine.finish()
    for each in later:
        each.check_answer()
    engine.check_cache()


def tell(place: Place, name: str, every: bool = False) -> None:
    """Runs the story with a fault in every call, or in some calls."""
    at, reached = 0, True
    while reached:
        with place.breaking(at) as calls:
            engine = story(name)
        failed = [each.received[-1] for each in engine.requests if each.failed]
        assert len(failed) <= place.most, f"call {at}: {failed}"
        go_on(engine)
        reached = len(calls) > at
        at += 1 if every else 1 + at // 2
    assert at > 1, "the story never came there"


@pytest.mark.parametrize("place", ANSWERS + BATCHES + CACHES, ids=str)
def test_a_fault_ends_at_most_the_request_that_it_concerns(place: Place) -> None:
    tell(place, "llama")


@pytest.mark.slow
@pytest.mark.parametrize("place", ANSWERS + BATCHES + CACHES, ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_every_fault_ends_at_most_the_request_that_it_concerns(name: str, place: Place) -> None:
    tell(place, name, every=True)


@pytest.mark.parametrize("name", KINDS)
def test_a_forward_that_breaks_ends_one_request_and_a_batch_of_them_none(name: str) -> None:
    forwards = story(name).forward.calls
    for at, (rows, _) in list(enumerate(forwards))[:: 3 if name == "llama" else 7]:
        engine = story(name, breaks_at=at)
        failed = [each.received[-1] for each in engine.requests if each.failed]
        assert len(failed) == (rows == 1), f"forward {at} of {rows} rows"
        assert all(isinstance(end, Failed) and "in the last layer" in end.text for end in failed), (
            "the client learns another reason"
        )
        go_on(engine)


def test_a_fault_of_one_row_leaves_the_others_together() -> None:
    engine = TinyEngine("llama")
    first, second, third = (engine.ask(words(30, number), 20) for number in range(3))
    engine.until(lambda: len(second.tokens) > 5)
    texts = {generation.request: generation.text for generation in engine.generations()}
    with breaking(texts[second.request], "push", 0):
        engine.advance(2)
    assert second.failed
    assert engine.phase(first) == engine.phase(third) == "batch"
    engine.forward.calls.clear()
    engine.advance(5)
    assert engine.forward.calls == [(2, 1)] * 5
    engine.finish()
    engine.check()


def test_answers_that_could_not_be_joined_are_not_joined_again() -> None:
    engine = TinyEngine("llama")
    for number in range(2):
        engine.ask(words(30, number), 20)
    engine.until(lambda: len(engine.generations()) == 2 and not engine.scheduler.prefilling)
    with breaking(BatchedLayers, "__init__", 0) as calls:
        engine.finish()
    assert len(calls) == 1
    assert engine.forward.most_rows == 1
    engine.check()


def test_an_answer_whose_first_step_breaks_a_batch_begins_alone() -> None:
    engine = TinyEngine("llama")
    first = engine.ask(words(30, 7), 20)
    engine.until(lambda: len(first.tokens) > 2)
    engine.forward.breaks = lambda rows, length: engine.forward.calls.count((2, 1)) == 1 and rows == 2
    engine.ask(words(31, 8), 8)
    engine.finish()
    engine.check()
    assert engine.forward.most_rows == 2
