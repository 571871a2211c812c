"""Many random clients within a small budget, measured by MLX's own counters.

The budget is the weights and 64 MiB; the keys and values of one request take up to half of that. The samples are the
bytes that MLX holds between two slices, those kept for reuse included, and its peak within them.
"""

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple
from unittest.mock import patch

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module

import runner.process.lean_mlx_lm  # noqa: F401

from mlx_lm.models import gemma3_text, llama  # isort: skip
from mlx_lm.models.cache import make_prompt_cache  # isort: skip

from runner.cache import make_cache
from runner.cache.sketch import Sketch
from runner.engine.events import EventStream, Failed, Finished, Refused
from runner.engine.memory import MemoryBudget, Meter, set_limits
from runner.engine.policy import SlicePolicy
from runner.engine.request import Request
from runner.engine.scheduler import Scheduler
from runner.sampling import SamplingOptions
from scripts.tools.models.tiny import VOCAB
from tests.lib.tiny_engine import core_parts, plain_outbox, tokenizer

MIB = 1 << 20
ROOM_BYTES = 64 * MIB
CHUNK = 64
LONGEST = 600
MOST_SLICES = 20_000
_TICK_S = 0.002  # of the schedule's clock for each look at it: who is computed together is no matter of the machine


_SHAPE: dict[str, object] = {
    "model_type": "any",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "sliding_window": 128,
    "sliding_window_pattern": 3,
}
MODELS: dict[str, Callable[[], Module]] = {
    "llama": lambda: llama.Model(llama.ModelArgs.from_dict(_SHAPE)),
    "gemma3": lambda: gemma3_text.Model(gemma3_text.ModelArgs.from_dict(_SHAPE)),
}
"""Models of which each token takes 48 KiB of keys and values; in the second, two of three layers have a window."""


class Seen(NamedTuple):
    """The samples of one run, in bytes, and the ends of its requests."""

    budget: int
    held: int
    peak: int
    ends: Counter[str]
    texts: set[str]


class SettledMeter(Meter):
    """MLX's counters once the CPU stream has let go of what it computed with, which on a busy machine takes it a moment
    longer than `mx.eval`."""

    def active(self) -> int:
        mx.synchronize()
        return super().active()


@contextmanager
def limits_restored() -> Iterator[None]:
    memory, cache = mx.get_memory_limit(), mx.set_cache_limit(0)
    mx.set_cache_limit(cache)
    try:
        yield
    finally:
        mx.set_memory_limit(memory)
        mx.set_cache_limit(cache)


def run(name: str, cache: str, seed: int, clients: int, room_bytes: int = ROOM_BYTES, chunk: int = CHUNK) -> Seen:
    """Runs clients that come at random, share prompts or not, and get short or long answers; a few leave."""
    chance = random.Random(f"{name} {seed}")
    model = MODELS[name]()
    mx.eval(model.parameters())
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    with limits_restored(), patch("runner.engine.scheduler.perf_counter", count(0, _TICK_S).__next__):
        budget = mx.get_active_memory() + room_bytes
        memory = MemoryBudget(SettledMeter(), budget, chunk, set_limits(budget, on_cpu=True))
        outbox = plain_outbox()

        def forward(tokens: mx.array, layers: list[object]) -> mx.array:
            found: mx.array = model(tokens, cache=layers)
            return found

        facts = Sketch(lambda: list(make_prompt_cache(model)), forward, VOCAB).facts
        parts = core_parts(forward, tokenizer(), lambda: make_cache(cache, facts), memory)
        parts.context_length, parts.policy = 8192, SlicePolicy(chunk, 0.1)
        running = Scheduler(parts, 8, outbox)
        running.batches.lone_steps = 2
        prompts = [[chance.randrange(VOCAB) for _ in range(LONGEST)] for _ in range(3)]
        asked: list[Request] = []
        held = 0
        for _ in range(MOST_SLICES):
            if len(asked) < clients and (running.idle or chance.random() < 0.1):
                asked.append(_request(chance, prompts))
                running.add(asked[-1])
            if chance.random() < 0.003:
                chance.choice(asked).cancel()
            if running.idle and len(asked) == clients:
                break
            running.compute_slice()
            outbox.send()
            held = max(held, mx.get_active_memory() + mx.get_cache_memory())
        else:
            raise AssertionError("they never end")
        ends = [request.stream._events[-1] for request in asked if not request.cancelled]
        texts = {event.text for event in ends if isinstance(event, Failed | Refused)}
        return Seen(budget, held, memory.peak(), Counter(type(event).__name__ for event in ends), texts)


def _request(chance: random.Random, prompts: list[list[int]]) -> Request:
    prompt = chance.choice(prompts)[: chance.randrange(5, LONGEST)]
    if chance.random() < 0.5:
        prompt = prompt + [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 100))]
    return Request(
        prompt=prompt,
        max_tokens=chance.choice((1, 10, 40, 90)),
        sampling=SamplingOptions(temperature=1.0, seed=chance.randrange(1000)),
        stops=None,
        metered=False,
        stream=EventStream(),
    )


@pytest.mark.parametrize(
    ("name", "cache"),
    [("llama", "trie"), ("gemma3", "trie"), ("llama", "single"), ("llama", "none")],
    ids=["trie-llama", "trie-gemma3", "single-llama", "none-llama"],
)
def test_the_budget_holds_to_five_percent(name: str, cache: str) -> None:
    seen = run(name, cache, seed=1, clients=24 if cache == "trie" else 8)
    assert seen.peak - seen.budget <= 0.05 * seen.budget
    assert seen.held - seen.budget <= 0.05 * seen.budget
    assert set(seen.ends) == {Finished.__name__}, f"{seen.texts}"
    if cache == "trie":
        assert seen.peak > seen.budget - ROOM_BYTES // 2, "what there is was used"


def test_no_request_ends_to_make_room_for_cache_entries() -> None:
    """Windows kept where prompts may diverge are locked while a request uses them."""
    seen = run("gemma3", "trie", seed=2, clients=12, room_bytes=ROOM_BYTES // 2)
    assert seen.peak <= 1.05 * seen.budget
    assert set(seen.ends) == {Finished.__name__}, f"{seen.texts}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", MODELS)
def test_the_budget_holds_for_random_clients(name: str, seed: int) -> None:
    seen = run(name, "trie", seed=10 + seed, clients=40)
    assert max(seen.peak, seen.held) <= 1.05 * seen.budget
    assert set(seen.ends) <= {Finished.__name__, Failed.__name__}
    assert seen.ends[Failed.__name__] <= 2, f"{seen.texts}"
