"""A budget that changes as time goes on, and a cache that gives up what nobody uses."""

import logging
from unittest.mock import patch

import pytest

from runner.cache import CACHE_KINDS, make_cache
from runner.cache.trie_cache import TrieCache
from scripts.tools.models.tiny import KINDS, tiny, words
from tests.lib.company import Company
from tests.lib.driver import check_trie


def filled(name: str, budget: int | None = None) -> Company:
    users = Company(name, budget=budget)
    for number in range(4):
        users.ask(words(60, number + 2), 4)
        users.finish()
    return users


@pytest.mark.parametrize("name", KINDS)
def test_a_smaller_bound_holds_at_once(name: str) -> None:
    users = filled(name)
    held = users.trie.nbytes
    for share in (0.7, 0.4, 0.1, 0.0):
        users.trie.bound(int(held * share))
        assert users.trie.nbytes <= held * share
        check_trie(users.trie)
    users.ask(words(60, 2), 4)
    users.finish()
    users.check()


def test_a_bound_is_never_more_than_the_budget() -> None:
    users = filled("llama", 20_000)
    users.trie.bound(10_000)
    assert users.trie.nbytes <= 10_000
    users.trie.bound(10**9)
    assert users.trie.describe().counts.budget_bytes == 20_000


def test_a_larger_bound_lets_it_keep_more_again() -> None:
    users = filled("llama")
    users.trie.bound(0)
    users.trie.bound(10**9)
    users.ask(words(60, 2), 4)
    users.finish()
    again = users.ask(words(60, 2), 4)
    users.finish()
    assert again.cached == 59


@pytest.mark.parametrize("name", KINDS)
def test_what_nobody_uses_is_all_gone_when_nothing_runs(name: str) -> None:
    users = filled(name)
    users.trie.evict()
    assert users.trie.nbytes == 0
    users.ask(words(60, 2), 4)
    users.finish()
    users.check()


@pytest.mark.parametrize("name", KINDS)
def test_what_an_open_session_uses_is_not_evicted(name: str) -> None:
    users = filled(name, 10**9)
    asked = users.ask([*words(60, 2), *words(30, 9)], 30)
    users.until(lambda: len(asked.tokens) > 3)
    before = users.trie.nbytes
    users.trie.evict()
    assert users.trie.describe().counts.budget_bytes == 10**9
    assert 0 < users.trie.nbytes < before
    users.finish()
    assert asked.finished
    users.check()
    assert users.trie.nbytes > 0, "it is kept"


def test_a_fault_while_something_goes_frees_all_of_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    users = filled("llama")
    with patch.object(TrieCache, "_enforce", side_effect=MemoryError):
        users.trie.bound(10)
    assert users.trie.nbytes == 0
    users.ask(words(60, 2), 4)
    users.finish()
    users.check()


@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_every_cache_has_the_verbs(kind: str) -> None:
    cache = make_cache(kind, tiny("llama").make_layers)
    cache.bound(0)
    cache.evict()
    assert cache.nbytes == 0
