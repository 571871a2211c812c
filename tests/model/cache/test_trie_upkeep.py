"""Checks that a trie cache piles nothing up in the long run, and frees at once what it must."""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast
from unittest.mock import patch

import mlx.core as mx
import pytest

import runner.process.lean_mlx_lm  # noqa: F401
from runner.cache import resume
from runner.cache.interface import Miss
from runner.cache.trie_cache import TrieCache

from mlx_lm.models.cache import KVCache, RotatingKVCache  # isort: skip

from scripts.tools.models.tiny import VOCAB, tiny, words
from tests.lib.driver import Accident, ask, ask_uncached, check_equal, check_trie
from tests.lib.layer_caches import Appending
from tests.lib.memory import held_bytes
from tests.lib.story import check_order

some_kinds = pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_next", "deepseek_v41"])


@contextmanager
def without_collector() -> Iterator[None]:
    """Python's own collector of cycles does nothing meanwhile."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@some_kinds
def test_what_is_forgotten_is_free_at_once(kind: str) -> None:
    """Not when Python happens to collect its garbage: nodes and their parents hold each other."""
    model = tiny(kind)
    ask_uncached(model, words(90))
    with without_collector():
        before = held_bytes()
        cache = TrieCache(model.make_layers)
        for seed in range(3):
            ask(model, cache, [*words(30), *words(60, seed)])
        assert held_bytes() > before + 10_000
        cache.clear()
        assert held_bytes() <= before + 4096


def test_a_failed_resume_frees_before_it_starts_anew() -> None:
    """It may have failed for want of memory."""
    model = tiny("llama")
    ask_uncached(model, words(90))
    free: list[int] = []
    open_session = TrieCache._resume

    def watched(self: TrieCache, prompt: list[int], *rest: object) -> object:
        free.append(held_bytes())
        return open_session(self, prompt, *rest)  # type: ignore[arg-type]

    with without_collector():
        before = held_bytes()
        cache = TrieCache(model.make_layers)
        for seed in range(3):
            ask(model, cache, words(90, seed))
        failing = patch.object(resume, "restore_to", _fail_with_something_in_hand)
        quiet = patch("runner.cache.trie_cache.log")  # pytest would keep what is logged, and the error with it
        with patch.object(TrieCache, "_resume", watched), failing, quiet, pytest.raises(MemoryError):
            cache.begin(words(90))
        assert free[0] > before + 10_000
        assert free[1] <= before + 4096
    check_equal(model, ask(model, cache, words(90)), ask_uncached(model, words(90)))


def _fail_with_something_in_hand(*_: object) -> None:
    """The error leads to this frame, and the frame to the array."""
    held = mx.ones((100_000,))
    mx.eval(held)
    raise MemoryError


class Clocks:
    """Two layers, of which the second skips every token from some offset on, over a trie cache."""

    def __init__(self, in_step: int, second: Callable[[], KVCache | RotatingKVCache] = KVCache) -> None:
        self.cache = TrieCache(lambda: [KVCache(), second()])
        self._in_step = in_step

    def ask(self, prompt: Sequence[int]) -> int:
        """Serves a prompt; returns the number of its tokens that came from the cache."""
        session = self.cache.begin(prompt)
        at = session.cached
        while at < len(prompt):
            count = session.next_forward(4) or 1
            with session.forward(count):
                for layer, least in zip(session.layers, (10**9, self._in_step), strict=True):
                    entries = max(0, min(at + count, least) - min(at, least))
                    if entries:
                        ones = mx.ones((1, 1, entries, 4))
                        cast("Appending", layer).update_and_fetch(ones, ones)
            at += count
        session.close()
        check_trie(self.cache)
        return session.cached


def test_a_layer_that_gets_out_of_step_late_costs_nothing_that_lasts(caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks(in_step=12)
    with caplog.at_level(logging.WARNING):
        assert clocks.ask(words(10)) == 0
        clocks.ask(words(20, seed=2))  # from here on the second layer is known for what it is
        for seed in (3, 4):
            clocks.ask([*words(10), *words(8, seed)])
            assert clocks.ask([*words(10), *words(8, seed), *words(4)]) == 18
    assert not caplog.records


def test_what_was_kept_of_a_layer_out_of_step_counts_no_more() -> None:
    """A window: the order in which nodes go is the same before and after, but not their weights."""
    clocks = Clocks(12, lambda: RotatingKVCache(max_size=64))
    for seed in (1, 2):
        clocks.ask(words(10, seed))
    kept = [node for node in clocks.cache.trie.nodes() if node.nbytes]
    before = [node.nbytes for node in kept]
    clocks.ask(words(20, seed=3))
    assert clocks.cache.sequences.facts.untrusted == {1}
    assert sum(node.nbytes for node in kept) < sum(before)
    check_order(clocks.cache)


def test_a_layer_out_of_step_stays_known_when_all_is_forgotten() -> None:
    clocks = Clocks(in_step=2)
    clocks.ask(words(10))
    assert clocks.cache.sequences.facts.untrusted == {1}
    clocks.cache.clear()
    assert clocks.cache.sequences.facts.untrusted == {1}
    assert not clocks.cache.sequences.kept.sliceable


@pytest.mark.parametrize("kind", ["mamba2", "qwen3_next"])
def test_nodes_without_content_do_not_pile_up(kind: str) -> None:
    """Under a bound of memory that they do not count for."""
    model = tiny(kind)
    cache = TrieCache(model.make_layers, 60_000)
    counts = []
    for seed in range(60):
        shared = words(30, seed)
        ask(model, cache, [*shared, *words(40, seed + 100)], say=1, chunk=100)
        ask(model, cache, [*shared, *words(40, seed + 200)], say=1, chunk=100)
        nodes = cache.nodes()
        parents = {node.parent for node in nodes}
        assert all(node.missing_layers < node.layers for node in nodes if node.id not in parents)
        counts.append(len(nodes))
    assert max(counts[30:]) <= max(counts[:30])


@pytest.mark.parametrize("kind", ["llama", "mamba2", "qwen3_next", "gemma3"])
def test_a_prompt_that_is_left_at_once_cuts_nothing(kind: str) -> None:
    model = tiny(kind)
    cache = TrieCache(model.make_layers)
    prompt = words(80)
    ask(model, cache, prompt, say=0, chunk=100)
    before = cache.describe().counts.nodes
    for at in range(40, 70):
        cache.begin([*prompt[:at], (prompt[at] + 1) % VOCAB]).close()
    assert cache.describe().counts.nodes <= before + 1
    check_equal(model, ask(model, cache, prompt), ask_uncached(model, prompt))


def test_spare_room_costs_no_tokens() -> None:
    """Buffers have room for up to 256 tokens more; a conversation that exceeds the bound only with it is kept."""
    model = tiny("llama")
    bytes_per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, width, float32
    cache = TrieCache(model.make_layers, 400 * bytes_per_token)
    prompt = words(290)
    ask(model, cache, prompt, say=0)
    assert cache.nbytes <= 400 * bytes_per_token
    assert cache.begin([*prompt, 1]).cached == 290


@pytest.mark.parametrize(
    ("kind", "prompt", "limited"), [("llama4", 32, False), ("gemma3", 1, False), ("mamba2", 32, True)]
)
def test_windows_and_chunks_do_not_count_as_states(kind: str, prompt: int, limited: bool) -> None:
    """A checkpoint costs them the tokens that it adds, anywhere; only states limit the checkpoints of a prompt."""
    model = tiny(kind)
    cache = TrieCache(model.make_layers, 100_000)
    ask(model, cache, words(prompt), say=0)
    assert (cache.sequences.facts.most_checkpoints(100_000) is not None) == limited


def test_tokens_freed_by_a_failure_count_as_lost() -> None:
    """Keys and values can go back; that they are not there is another reason than that of a state."""
    model = tiny("llama")
    cache = TrieCache(model.make_layers)
    ask(model, cache, [*words(40), *words(20, seed=2)], say=0)
    ask(model, cache, [*words(40), *words(20, seed=3)], say=0)  # what the two share is live, the first end is not
    ask(model, cache, [*words(40), *words(20, seed=4)], accident=Accident("break", 0))
    check_trie(cache)
    session = cache.begin([*words(40), *words(20, seed=2), 1])
    assert (session.matched, session.cached, session.miss) == (60, 0, Miss.LOST)
    session.close()
