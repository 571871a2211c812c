"""What goes wrong while several requests run: it ends the one that it concerns, if any, and the others do not notice.

One story for every fault: three answers of different lengths are begun, read in slices, joined, decoded together, taken
apart again and closed, and then two of the prompts are asked once more. The fault is an exception in the k-th call of
something, for k = 0, 1, 2, 4, 7, ... until the story does not get there any more; in slow tests for every k.
"""

import logging
from contextlib import AbstractContextManager
from typing import NamedTuple

import mlx.core as mx
import pytest

from runner.cache.decode_rows import DecodeRows
from runner.cache.layers.batch import BatchedLayers
from runner.cache.sequence import SequenceLayers
from runner.cache.session import LiveSession
from runner.cache.trie import PrefixTrie
from runner.cache.trie_cache import TrieCache
from runner.engine.detokenizer import Detokenizer
from runner.engine.generation import Generation
from runner.engine.policy import SlicePolicy
from runner.sampling.sample import Sample
from runner.sampling.sampler import Sampler, SamplerBatch
from runner.tokenizer import Tokenizer
from scripts.tools.models.tiny import KINDS, words
from tests.lib.company import BATCHABLE, Company, breaking

FIRST, SECOND, THIRD = words(41, 1), [*words(33, 1), 9, 9, 9, 9], words(20, 3)


class Place(NamedTuple):
    """Where something breaks, and how many requests that may end."""

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
    Place(LiveSession, "record", 1),
    Place(Sample, "read", 1),
    Place(mx, "eval", 1),
    Place(mx, "async_eval", 1),
    Place(SequenceLayers, "advance", 1),
    Place(Generation, "close", 0),
]
"""What concerns one request."""

BATCHES = [
    Place(DecodeRows, "join", 0),
    Place(DecodeRows, "settle", 1),
    Place(LiveSession, "absorb", 1),
    Place(SequenceLayers, "absorb", 1),
    Place(BatchedLayers, "__init__", 0),
    Place(BatchedLayers, "extend", 0),
    Place(BatchedLayers, "keep", 0),
    Place(Sample, "joined", 0),
    Place(Sample, "take", 0),
    Place(SamplerBatch, "__init__", 0),
    Place(SamplerBatch, "__call__", 0),
    Place(SamplerBatch, "release", 0),
]
"""What concerns those that decode together: each can go on alone, but for one that cannot take up its own layers."""

CACHES = [
    Place(TrieCache, "_follows", 0),
    Place(TrieCache, "_resume", 0),
    Place(TrieCache, "_store", 0),
    Place(TrieCache, "_enforce", 1),
    Place(TrieCache, "_close", 0),
    Place(PrefixTrie, "advance", 1),
    Place(PrefixTrie, "match", 1),
    Place(PrefixTrie, "compact", 0),
    Place(SequenceLayers, "evaluate", 1),
    Place(SequenceLayers, "rewind", 0),
]
"""What the cache keeps of them, which nobody needs for his answer."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Faults are logged with their tracebacks, which take longer than the rest."""
    caplog.set_level(logging.CRITICAL)


def story(name: str, breaks_at: int = -1) -> Company:
    """The three from their beginnings to their ends: the second shares a prefix with the first, the third comes later.
    `breaks_at` is the number of a forward that breaks, from 0."""
    company = Company(name, SlicePolicy(16, 0.1))
    company.forward.breaks = lambda rows, length: len(company.forward.calls) == breaks_at + 1
    company.ask(FIRST, 14, logprobs=True, top_logprobs=2)
    company.ask(SECOND, 6, temperature=0.9, seed=3, repeat_penalty=1.2, repeat_last_n=16)
    company.advance(7)
    company.ask(THIRD, 9, temperature=0.9, seed=4, top_k=20, metered=True)
    company.finish()
    return company


def go_on(company: Company) -> None:
    """The same engine serves those that come later, and nothing is wrong with what it kept."""
    company.check()
    later = [company.ask([*FIRST, 7], 5), company.ask(SECOND, 5, temperature=1, seed=1)]
    company.finish()
    for each in later:
        each.check_answer()
    company.check_cache()


def tell(place: Place, name: str, every: bool = False) -> None:
    """The story with a fault in every call, or in some of them."""
    at, reached = 0, True
    while reached:
        with place.breaking(at) as calls:
            company = story(name)
        failed = [each.told[-1] for each in company.everyone if each.failed]
        assert len(failed) <= place.most, f"call {at}: {failed}"
        go_on(company)
        reached = len(calls) > at
        at += 1 if every else 1 + at // 2
    assert at > 1, "the story never came there"


@pytest.mark.parametrize("place", ANSWERS + BATCHES + CACHES, ids=str)
def test_a_fault_ends_at_most_the_request_that_it_concerns(place: Place) -> None:
    tell(place, "llama")


@pytest.mark.parametrize("place", [*BATCHES[1:4], *BATCHES[6:7], Place(mx, "eval", 1)], ids=str)
@pytest.mark.parametrize("name", ["gemma3", "mamba2", "qwen3_next"])
def test_a_fault_in_other_layers_ends_at_most_the_request_that_it_concerns(name: str, place: Place) -> None:
    tell(place, name)


@pytest.mark.slow
@pytest.mark.parametrize("place", ANSWERS + BATCHES + CACHES, ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_every_fault_ends_at_most_the_request_that_it_concerns(name: str, place: Place) -> None:
    tell(place, name, every=True)


@pytest.mark.parametrize("name", KINDS)
def test_a_forward_that_breaks_ends_one_request_and_a_batch_of_them_none(name: str) -> None:
    forwards = story(name).forward.calls
    for at, (rows, _) in list(enumerate(forwards))[:: 3 if name == "llama" else 7]:
        company = story(name, breaks_at=at)
        assert sum(each.failed for each in company.everyone) == (rows == 1), f"forward {at} of {rows} rows"
        go_on(company)


@pytest.mark.parametrize("name", BATCHABLE)
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_step_of_several_that_breaks_lets_each_go_on_alone_from_where_it_is(name: str, steps: int) -> None:
    company = Company(name)
    for number in range(3):
        company.ask(words(30, number), 15, temperature=0.8 * number, seed=number, repeat_penalty=1.3, repeat_last_n=64)
    company.until(lambda: all(company.phase(each) == "batch" for each in company.everyone))
    company.advance(steps)
    said = [len(each.tokens) for each in company.everyone]
    company.forward.breaks = lambda rows, length: rows > 1
    company.forward.calls.clear()
    company.finish()
    company.check()
    assert [rows for rows, _ in company.forward.calls].count(3) == company.forward.most_rows - 2 == 1
    # What the batch had seen is computed again, and no more than that.
    again = company.forward.tokens - 3 - sum(15 - count for count in said)
    assert 0 <= again <= 3 * (steps + 2)
    assert all(each.finished for each in company.everyone)


@pytest.mark.parametrize("name", BATCHABLE)
def test_what_was_drawn_before_the_first_step_together_is_not_lost_with_it(name: str) -> None:
    company = Company(name)
    company.forward.breaks = lambda rows, length: rows > 1
    for number in range(3):
        company.ask(words(30, number), 10, temperature=0.8 * number, seed=number)
    company.finish()
    company.check()
    assert [rows for rows, _ in company.forward.calls].count(2) == 1
    assert company.forward.tokens == 3 * (29 + 10) + 2
    assert all(each.finished for each in company.everyone)


def test_a_fault_of_one_row_leaves_the_others_together() -> None:
    company = Company("llama")
    first, second, third = (company.ask(words(30, number), 20) for number in range(3))
    company.until(lambda: len(second.tokens) > 5)
    texts = {generation.request: generation._text for generation in company.generations()}
    with breaking(texts[second.request], "push", 0):
        company.advance(2)
    assert second.failed
    assert company.phase(first) == company.phase(third) == "batch"
    company.forward.calls.clear()
    company.advance(5)
    assert company.forward.calls == [(2, 1)] * 5
    company.finish()
    company.check()


def test_a_row_that_cannot_take_its_layers_up_again_leaves_the_others_together() -> None:
    company = Company("llama")
    first, second, third = (company.ask(words(30, number), 10 * number + 10) for number in range(3))
    company.until(lambda: company.phase(third) == "batch")
    with breaking(DecodeRows, "settle", 0) as calls:
        company.until(lambda: first.finished is not None)
        company.advance()
    assert calls
    assert company.phase(second) == company.phase(third) == "batch"
    company.finish()
    company.check()


def test_answers_that_could_not_be_joined_are_not_joined_again() -> None:
    company = Company("llama")
    for number in range(2):
        company.ask(words(30, number), 20)
    company.until(lambda: len(company.generations()) == 2 and not company.running.prefilling)
    with breaking(BatchedLayers, "__init__", 0) as calls:
        company.finish()
    assert len(calls) == 1
    assert company.forward.most_rows == 1
    company.check()


def test_a_session_that_does_not_open_fails_its_request_and_costs_the_cache_only() -> None:
    company = Company("llama")
    running = company.ask(FIRST, 20)
    company.until(lambda: len(running.tokens) > 5)
    with breaking(TrieCache, "begin", 0):
        bad, good = company.ask(SECOND, 5), company.ask(THIRD, 5)
        company.finish()
    assert bad.failed
    assert running.finished
    assert good.finished
    go_on(company)


def test_a_session_that_does_not_close_has_been_answered_all_the_same() -> None:
    company = Company("llama")
    asked = [company.ask(prompt, 6 + 4 * number) for number, prompt in enumerate((FIRST, SECOND, THIRD))]
    with breaking(Generation, "close", 0):
        company.finish()
    assert all(each.finished for each in asked)
    go_on(company)
