"""Checks that a trie cache piles nothing up in the long run, and frees at once what it must.

Scenarios: docs/internals/cache.md, 8.
"""

from unittest.mock import patch

import mlx.core as mx
import pytest

from runner.cache import resume
from runner.cache.layer_interface import Miss
from runner.cache.trie_cache import TrieCache
from runner.numbers.cache import cache_nodes
from scripts.tools.models.tiny import VOCAB, tiny, words
from tests.lib.driver import Accident, ask, ask_uncached, check_equal, check_trie
from tests.lib.memory import exact_memory, held_bytes


def test_a_failed_resume_frees_before_it_starts_anew() -> None:
    """It may have failed for want of memory."""
    model = tiny("llama")
    ask_uncached(model, words(90))
    free: list[int] = []
    open_session = TrieCache._resume

    def watched(self: TrieCache, prompt: list[int], *rest: object) -> object:
        free.append(held_bytes())
        return open_session(self, prompt, *rest)  # type: ignore[arg-type]

    with exact_memory():
        before = held_bytes()
        cache = TrieCache(model.facts)
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


@pytest.mark.parametrize("kind", ["qwen3_next"])
def test_nodes_without_content_do_not_pile_up(kind: str) -> None:
    """Under a bound of memory that they do not count for."""
    model = tiny(kind)
    cache = TrieCache(model.facts, 60_000)
    counts = []
    for seed in range(30):
        shared = words(30, seed)
        ask(model, cache, [*shared, *words(40, seed + 100)], say=1, chunk=100)
        ask(model, cache, [*shared, *words(40, seed + 200)], say=1, chunk=100)
        nodes = cache_nodes(cache)
        parents = {node.parent for node in nodes}
        assert all(node.missing_layers < node.layers for node in nodes if node.id not in parents)
        counts.append(len(nodes))
    assert max(counts[15:]) <= max(counts[:15])


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_prompt_that_is_left_at_once_cuts_nothing(kind: str) -> None:  # scenarios 9 and 55
    model = tiny(kind)
    cache = TrieCache(model.facts)
    prompt = words(80)
    ask(model, cache, prompt, say=0, chunk=100)
    before = len(cache_nodes(cache))
    for at in range(40, 70):
        cache.begin([*prompt[:at], (prompt[at] + 1) % VOCAB]).close()
    assert len(cache_nodes(cache)) <= before + 1
    check_equal(model, ask(model, cache, prompt), ask_uncached(model, prompt))


def test_tokens_freed_by_a_failure_count_as_lost() -> None:
    """Keys and values can go back; that they are not there is another reason than that of a state."""
    model = tiny("llama")
    cache = TrieCache(model.facts)
    ask(model, cache, [*words(40), *words(20, seed=2)], say=0)
    ask(model, cache, [*words(40), *words(20, seed=3)], say=0)  # what the two share is live, the first end is not
    ask(model, cache, [*words(40), *words(20, seed=4)], accident=Accident("break", 0))
    check_trie(cache)
    session = cache.begin([*words(40), *words(20, seed=2), 1])
    assert (session.matched, session.cached, session.miss) == (60, 0, Miss.LOST)
    session.close()
