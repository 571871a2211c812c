"""The picture of a cache shows what is there, and looking at it changes nothing."""

from collections.abc import Sequence

import pytest

from protocol.stats import CacheNode
from runner.cache import make_cache
from runner.numbers.cache import cache_nodes, describe_cache
from scripts.tools.models.tiny import VOCAB, tiny
from tests.lib.driver import ask
from tests.lib.fakes import FAMILIES
from tests.lib.story import Conversation
from tests.lib.together import Together

A = [1, 2, 3, 4, 5, 6, 7, 8]
B = [*A[:5], 10, 11, 12]
PROMPT = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(50)]
everyone = pytest.mark.parametrize("family", FAMILIES)


def spell(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


def drawn(users: Conversation | Together) -> list[CacheNode]:
    return cache_nodes(users.cache)


def branched(family: str = "K") -> Conversation:
    """Two conversations that part after five tokens; the layers stand at the end of the second."""
    users = Conversation(family, "trie")
    users.serve(A, [20, 21])
    users.serve(B, [30, 31])
    return users


def test_where_the_layers_stand_is_live_and_the_rest_is_paged_out() -> None:
    by_text = {node.text: node for node in cache_nodes(branched().cache, spell)}
    shared, first, second = (by_text[spell(tokens)] for tokens in (A[:5], [6, 7, 8], [10, 11, 12]))
    assert (shared.live_layers, shared.paged_layers) == (second.live_layers, second.paged_layers) == (2, 0)
    assert (first.live_layers, first.paged_layers) == (0, 2)
    # A fake token takes a byte in each of the two layers.
    assert [(node.live_bytes, node.paged_bytes, node.bytes) for node in (shared, first, second)] == [
        (10, 0, 10),
        (0, 6, 6),
        (6, 0, 6),
    ]


@everyone
def test_the_bytes_and_layers_of_the_nodes_are_those_that_the_cache_counts(family: str) -> None:
    users = branched(family)
    picture, counted = drawn(users), describe_cache(users.trie).counts
    assert counted.paged_bytes == sum(node.paged_bytes for node in picture)
    assert counted.held_bytes == users.cache.nbytes == counted.live_bytes + counted.paged_bytes
    assert counted.nodes == len(picture)
    entries = {"K": 2, "S": 1, "R": 1, "P": 0}[family] * 4  # the first branch is paged out
    assert counted.checkpoint_bytes == counted.paged_bytes - entries
    held = sum(node.live_layers + node.paged_layers for node in picture)
    assert held == users.trie.sequences.totals.ledger.count
    assert all(node.live_layers + node.paged_layers + node.missing_layers == node.layers == 2 for node in picture)
    assert all(node.bytes == node.live_bytes + node.paged_bytes for node in picture)
    assert counted.running_bytes == 0
    session = users.trie.begin(A)
    session.sequence.layers[0].see(A)  # type: ignore[attr-defined]
    assert describe_cache(users.trie).counts.running_bytes == session.sequence.nbytes > 0


def test_of_a_very_large_trie_the_latest_nodes_are_drawn_and_the_way_to_them() -> None:
    users = branched()
    for first in range(40, 60):
        users.serve([*A, 20, first], [1])
    texts = [node.text for node in cache_nodes(users.trie, spell)]
    latest = cache_nodes(users.trie, spell, most=3)
    assert 3 <= len(latest) < len(texts) == describe_cache(users.trie).counts.nodes
    assert [node.text for node in latest] == [text for text in texts if text in {node.text for node in latest}]
    assert spell([59]) in [node.text for node in latest]
    assert spell([40]) not in [node.text for node in latest]
    ids = {node.id for node in latest}
    assert all(node.parent is None or node.parent in ids for node in latest)


@everyone
def test_looking_changes_nothing(family: str) -> None:
    users = branched(family)
    trie, ledger = users.trie.trie, users.trie.sequences.totals.ledger

    def state() -> tuple[object, ...]:
        order = [(node, node.used, node.locks, list(node.slots)) for node in trie.nodes()]
        return trie.now, set(trie.changed), ledger.count, ledger.nbytes, users.cache.nbytes, order

    before = state()
    cache_nodes(users.trie, spell)
    describe_cache(users.trie)
    assert state() == before


def test_what_goes_for_want_of_room_is_counted_and_so_is_what_comes_back() -> None:
    users = Conversation("K", "trie", budget=40)
    users.serve(A, [20, 21])
    users.serve([30, 31, 32, 33, 34], [35])
    before = describe_cache(users.trie).counts
    assert (before.evictions, before.evicted_bytes, before.restored_bytes) == (0, 0, 0)
    users.serve([*A, 20, 9], [9])
    restored = describe_cache(users.trie).counts.restored_bytes
    assert restored == 2 * len([*A, 20]), "nine tokens in two layers, which were paged out"
    users.serve([50 + i for i in range(12)], [62])
    after = describe_cache(users.trie).counts
    assert after.evictions > 0
    assert after.evicted_bytes >= 2 * 5, "the five tokens that were not used again"
    assert after.restored_bytes == restored
    assert after.held_bytes <= 40


def test_a_single_entry_is_one_node() -> None:
    users = Conversation("K", "single")
    assert (drawn(users), describe_cache(users.cache).counts.nodes) == ([], 0)
    users.serve(A, [20, 21])
    (node,) = cache_nodes(users.cache, spell)
    assert (node.start, node.end, node.parent, node.locks, node.text) == (0, 9, None, 0, spell([*A, 20]))
    assert (node.layers, node.live_layers, node.missing_layers) == (2, 2, 0)
    assert node.bytes == node.live_bytes == users.cache.nbytes == describe_cache(users.cache).counts.held_bytes


def test_the_text_of_a_single_entry_is_hidden_while_it_is_written() -> None:
    kind = tiny("llama")
    cache = make_cache("single", kind.facts)
    assert ask(kind, cache, PROMPT).tokens
    session = cache.begin(PROMPT)
    (node,) = cache_nodes(cache, spell)
    assert (node.text, node.locks) == (None, 1)
    session.close()
    (node,) = cache_nodes(cache, spell)
    assert (node.text, node.locks) == (spell(PROMPT[: node.end]), 0)
