"""A budget that changes over time, and a cache that evicts unused entries."""

import logging
from unittest.mock import patch

import pytest

from runner.cache import CACHE_KINDS, make_cache
from runner.cache.trie_cache import TrieCache
from scripts.tools.models.tiny import KINDS, tiny, words
from tests.lib.driver import check_trie
from tests.lib.tiny_engine import TinyEngine


def filled(name: str, budget: int | None = None) -> TinyEngine:
    engine = TinyEngine(name, budget=budget)
    for number in range(4):
        engine.ask(words(60, number + 2), 4)
        engine.finish()
    return engine


@pytest.mark.parametrize("name", KINDS)
def test_a_smaller_bound_holds_at_once(name: str) -> None:
    engine = filled(name)
    held = engine.trie.nbytes
    for share in (0.7, 0.4, 0.1, 0.0):
        engine.trie.bound(int(held * share))
        assert engine.trie.nbytes <= held * share
        check_trie(engine.trie)
    engine.ask(words(60, 2), 4)
    engine.finish()
    engine.check()


def test_a_bound_is_never_more_than_the_budget() -> None:
    engine = filled("llama", 20_000)
    engine.trie.bound(10_000)
    assert engine.trie.nbytes <= 10_000
    engine.trie.bound(10**9)
    assert engine.trie.describe().counts.budget_bytes == 20_000


def test_a_larger_bound_lets_it_keep_more_again() -> None:
    engine = filled("llama")
    engine.trie.bound(0)
    engine.trie.bound(10**9)
    engine.ask(words(60, 2), 4)
    engine.finish()
    again = engine.ask(words(60, 2), 4)
    engine.finish()
    assert again.cached == 59


@pytest.mark.parametrize("name", KINDS)
def test_all_unused_entries_are_evicted_when_nothing_runs(name: str) -> None:
    engine = filled(name)
    engine.trie.evict()
    assert engine.trie.nbytes == 0
    engine.ask(words(60, 2), 4)
    engine.finish()
    engine.check()


@pytest.mark.parametrize("name", KINDS)
def test_what_an_open_session_uses_is_not_evicted(name: str) -> None:
    engine = filled(name, 10**9)
    asked = engine.ask([*words(60, 2), *words(30, 9)], 30)
    engine.until(lambda: len(asked.tokens) > 3)
    before = engine.trie.nbytes
    engine.trie.evict()
    assert engine.trie.describe().counts.budget_bytes == 10**9
    assert 0 < engine.trie.nbytes < before
    engine.finish()
    assert asked.finished
    engine.check()
    assert engine.trie.nbytes > 0, "it is kept"


def test_a_fault_while_something_goes_frees_all_of_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    engine = filled("llama")
    with patch.object(TrieCache, "enforce_budget", side_effect=MemoryError):
        engine.trie.bound(10)
    assert engine.trie.nbytes == 0
    engine.ask(words(60, 2), 4)
    engine.finish()
    engine.check()


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_every_cache_has_the_verbs(kind: str) -> None:
    cache = make_cache(kind, tiny("llama").make_layers)
    cache.bound(0)
    cache.evict()
    assert cache.nbytes == 0
