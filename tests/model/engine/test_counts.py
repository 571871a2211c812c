"""The cost of a token in counts: forwards, evaluations, reads from the device, bytes copied.

These tests keep the counts from growing unnoticed; `scripts/bench` measures times. One *round trip* is a read that
waits for the device.
"""

from collections.abc import Callable, Sequence
from math import ceil
from typing import NamedTuple

import mlx.core as mx
import pytest

import runner.cache.layers.kv
import runner.cache.sequence
import runner.engine.generation
from runner.cache.layers.batched import BatchedLayers
from runner.cache.layers.snapshot import Copy, complete
from runner.engine.policy import SlicePolicy
from runner.sampling.sample import Choice, SampledTokens
from scripts.tools.models.tiny import KINDS, VOCAB
from tests.lib.tiny_engine import BATCHABLE, SLICEABLE, TinyEngine

CHUNK = 32
PROMPT = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(100)]
OTHER = [(5 * i * i + i + 2) % VOCAB for i in range(100)]
ANSWER = 12


class Counts(NamedTuple):
    """The counts since the beginning."""

    forwards: int
    started: int
    """calls of `mx.async_eval`"""
    computed: int
    """calls of `mx.eval`"""
    round_trips: int
    copied: int
    """bytes of copies that snapshots and batches made"""

    def since(self, before: "Counts") -> "Counts":
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


class Tally:
    """The counter of an engine."""

    def __init__(self) -> None:
        self.started = self.computed = self.round_trips = self.copied = 0

    def counts(self, engine: TinyEngine) -> Counts:
        return Counts(len(engine.forward.calls), self.started, self.computed, self.round_trips, self.copied)

    def complete(self, copies: list[Copy]) -> None:
        self.copied += sum(array.nbytes for copy in copies for array in copy.owned.arrays)
        complete(copies)


@pytest.fixture
def tally(monkeypatch: pytest.MonkeyPatch) -> Tally:
    tally = Tally()
    start: Callable[[list[mx.array]], None] = mx.async_eval
    compute: Callable[[Sequence[list[mx.array]]], None] = mx.eval
    read, make = SampledTokens.read, BatchedLayers.__init__

    def async_eval(arrays: list[mx.array]) -> None:
        tally.started += 1
        start(arrays)

    def evaluate(*arrays: list[mx.array]) -> None:
        tally.computed += 1
        compute(arrays)

    def read_sample(sample: SampledTokens) -> list[Choice]:
        tally.round_trips += 1
        return read(sample)

    def make_batch(batch: BatchedLayers, rows: Sequence[list[object]]) -> None:
        make(batch, rows)
        tally.copied += batch.nbytes

    monkeypatch.setattr(mx, "async_eval", async_eval)
    monkeypatch.setattr(mx, "eval", evaluate)
    monkeypatch.setattr(SampledTokens, "read", read_sample)
    monkeypatch.setattr(BatchedLayers, "__init__", make_batch)
    for module in (runner.cache.sequence, runner.cache.layers.kv):
        monkeypatch.setattr(module, "complete", tally.complete)
    return tally


def make_engine(name: str) -> TinyEngine:
    return TinyEngine(name, SlicePolicy(CHUNK, 0.1))


def counted(tally: Tally, engine: TinyEngine, ask: Callable[[], object]) -> Counts:
    """Returns the counts of these requests, from the first arrival to the last end."""
    before = tally.counts(engine)
    ask()
    engine.finish()
    found = tally.counts(engine).since(before)
    for asked in engine.requests:  # the oracle evaluates and reads, too
        asked.check_answer()
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_cold_prompt_takes_a_forward_a_chunk_and_a_token_one_of_each(name: str, tally: Tally) -> None:
    here = make_engine(name)
    found = counted(tally, here, lambda: here.ask(PROMPT, ANSWER))
    prefills = [length for _, length in here.forward.calls if length > 1]
    assert sum(prefills) == len(PROMPT) - 1
    # Layers that can only resume where they stood stop at points of their own, besides at the ends of chunks.
    assert len(prefills) == ceil((len(PROMPT) - 1) / CHUNK) if name in SLICEABLE else len(prefills) <= 8
    assert found.forwards == len(prefills) + ANSWER
    assert found.started == found.round_trips == ANSWER


@pytest.mark.parametrize(("cuda", "clears"), [(False, ceil((len(PROMPT) - 1) / CHUNK)), (True, 0)])
def test_a_gpu_of_nvidia_keeps_buffers_for_the_next_prompt(
    cuda: bool, clears: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, calls = make_engine("llama"), list[None]()
    monkeypatch.setattr(runner.engine.generation, "on_cuda", lambda: cuda)
    monkeypatch.setattr(mx, "clear_cache", lambda: calls.append(None))
    here.ask(PROMPT, ANSWER)
    here.finish()
    assert len(calls) == clears


@pytest.mark.parametrize("name", SLICEABLE)
def test_a_conversation_that_goes_on_copies_nothing(name: str, tally: Tally) -> None:
    here = make_engine(name)
    first = here.ask(PROMPT, ANSWER)
    here.finish()
    longer = [*PROMPT, *first.tokens, *OTHER[:20]]
    found = counted(tally, here, lambda: here.ask(longer, ANSWER))
    assert found.forwards == ceil(20 / CHUNK) + ANSWER
    assert found.copied == 0


@pytest.mark.parametrize("name", BATCHABLE)
def test_answers_together_share_each_step_and_are_copied_once(name: str, tally: Tally) -> None:
    here = make_engine(name)
    begun = tally.counts(here)  # the first engine of a kind has found out whether its rows may be joined
    one, two = here.ask(PROMPT, 40), here.ask(OTHER, 40)
    here.until(lambda: here.phase(one) == here.phase(two) == "batch")
    joined = tally.counts(here)
    batch = here.scheduler.batches.all[0].nbytes
    assert 0 < joined.since(begun).copied <= 3 * batch
    here.advance(10)
    found = tally.counts(here).since(joined)
    assert found == Counts(forwards=10, started=10, computed=0, round_trips=10, copied=0)
    here.finish()
    for asked in here.requests:
        asked.check_answer()
