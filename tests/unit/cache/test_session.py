"""The contract of every cache: the registry, the plan of a prefill, one session at a time.

Scenarios: docs/internals/cache.md, 8.
"""

from collections.abc import Sequence
from typing import cast

import pytest

from runner.cache import CACHE_KINDS, make_cache
from runner.cache.layer_interface import Miss
from runner.cache.node import common_prefix
from runner.cache.single import NullCache, SingleEntryCache
from runner.cache.trie_cache import TrieCache
from tests.lib.fakes import FakeKV, FakeLayer, facts_of_fakes

every_cache = pytest.mark.parametrize("kind", CACHE_KINDS)


FACTS = facts_of_fakes((FakeKV, FakeKV))


def test_every_kind_of_the_registry_can_be_made() -> None:
    made = [type(make_cache(kind, FACTS)) for kind in CACHE_KINDS]
    assert made == [TrieCache, SingleEntryCache, NullCache]


@every_cache
@pytest.mark.parametrize(
    ("prompt", "chunk", "plan"),
    [(1, 4, []), (2, 4, [1]), (5, 4, [4]), (6, 4, [4, 1]), (9, 4, [4, 4]), (9, 100, [8]), (3, 1, [1, 1])],
)
def test_a_prefill_leaves_one_token(kind: str, prompt: int, chunk: int, plan: list[int]) -> None:
    session = make_cache(kind, FACTS).begin(list(range(prompt)))
    lengths = []
    while count := session.next_forward(chunk):
        with session.forward(count):
            lengths.append(count)
    assert lengths == plan


@every_cache
def test_a_second_session_has_layers_of_its_own_or_is_refused(kind: str) -> None:  # scenario 83
    cache = make_cache(kind, FACTS)
    session = cache.begin([1, 2])
    if cache.concurrent:
        second = cache.begin([1, 2])
        assert not {id(layer) for layer in second.layers} & {id(layer) for layer in session.layers}
        second.close()
    else:
        with pytest.raises(RuntimeError, match="open"):
            cache.begin([1, 2])
    session.close()
    cache.begin([1, 2]).close()
    cache.detach()
    assert cache.nbytes == 0


@every_cache
@pytest.mark.parametrize("empty", [[], (), range(0)])
def test_an_empty_prompt_opens_no_session(kind: str, empty: Sequence[int]) -> None:  # scenario 7
    cache = make_cache(kind, FACTS)
    with pytest.raises(ValueError, match="at least one token"):
        cache.begin(empty)
    cache.begin([1]).close()


@every_cache
def test_closing_twice_does_nothing(kind: str) -> None:  # scenario 85
    cache = make_cache(kind, FACTS)
    first = cache.begin([1, 2])
    first.close()
    second = cache.begin([1, 2])
    first.failed = True
    first.close()
    if isinstance(cache, TrieCache):
        assert cache.sequences.sessions == [second]
    else:
        with pytest.raises(RuntimeError, match="is open"):
            cache.begin([3])
    second.close()


@every_cache
def test_a_closed_or_failed_session_runs_no_forward(kind: str) -> None:
    cache = make_cache(kind, FACTS)
    session = cache.begin([1, 2, 3])
    with pytest.raises(ZeroDivisionError), session.forward(1):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="failed"), session.forward(1):
        pass
    session.close()
    closed = cache.begin([1, 2, 3])
    closed.close()
    with pytest.raises(RuntimeError, match="closed"), closed.forward(1):
        pass


@every_cache
def test_nothing_is_kept_of_a_session_that_is_distrusted(kind: str) -> None:
    cache = make_cache(kind, FACTS)
    session = cache.begin([1, 2, 3])
    with session.forward(2):
        for layer in session.layers:
            cast("FakeKV", layer).see([1, 2])
    session.distrusted = True
    session.close()
    assert cache.begin([1, 2, 3]).cached == 0


def test_no_cache_keeps_nothing() -> None:
    cache = NullCache(FACTS)
    for _ in range(2):
        session = cache.begin([1, 2, 3])
        assert (session.matched, session.cached, session.miss) == (0, 0, Miss.OFF)
        assert session.remaining == [1, 2, 3]
        for layer in session.layers:
            assert isinstance(layer, FakeLayer)
            assert not layer.nbytes
            layer.see([1, 2])
        session.close()
        # Freed now, although its user may hold the session for longer.
        assert not any(layer.nbytes for layer in session.layers if isinstance(layer, FakeLayer))
    assert cache.nbytes == 0


@pytest.mark.parametrize("length", [0, 1, 2047, 2048, 2049, 5000])
def test_the_common_prefix_ends_at_the_first_difference(length: int) -> None:
    a = list(range(length))
    assert common_prefix(a, a) == length
    assert common_prefix(a, [*a, 1]) == length
    assert common_prefix([*a, -1, 5, 5], [*a, -2, 5, 5]) == length
