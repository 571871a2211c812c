"""Counts the work of the trie cache for one request, which does not grow with the nodes of other conversations, and
checks that nothing piles up in the long run. Scenarios: docs/internals/cache.md, 8."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest

from runner.cache import resume
from runner.cache.eviction import EvictionOrder
from runner.cache.layer_interface import Miss
from runner.cache.layers import snapshot
from runner.cache.layers.snapshot import Ledger, own
from runner.cache.sequence import SequenceLayers
from runner.cache.trie import PrefixTrie
from runner.cache.trie_cache import TrieCache
from runner.numbers.cache import cache_nodes
from scripts.tools.models.tiny import VOCAB, tiny, words
from tests.lib.driver import Accident, ask, ask_uncached, check_equal, check_trie
from tests.lib.fakes import FAMILIES, FakeLayer, facts_of_fakes
from tests.lib.memory import exact_memory, held_bytes
from tests.lib.story import Every
from tests.model.cache.test_memory import LAYERS, deep

everyone = pytest.mark.parametrize("family", FAMILIES)


class Users:
    """Many who said something once, over fake layers."""

    def __init__(self, family: str, count: int) -> None:
        self.cache = TrieCache(facts_of_fakes(FAMILIES[family]), None, Every(8))
        for user in range(count):
            self.ask([1, 2, 3, *range(100 + 20 * user, 120 + 20 * user)])

    def ask(self, prompt: Sequence[int]) -> None:
        session = self.cache.begin(prompt)
        while (at := session.position) < len(prompt):
            count = session.next_forward(99) or 1
            with session.forward(count):
                for layer in session.layers:
                    assert isinstance(layer, FakeLayer)
                    layer.see(prompt[at : at + count])
        session.close()


@contextmanager
def counting(*functions: tuple[type, str]) -> Iterator[list[str]]:
    """The names of the methods, in the order of their calls."""
    calls: list[str] = []

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: object, **named: object) -> object:
            calls.append(name)
            return original(*arguments, **named)

        return call

    with ExitStack() as patches:
        for where, name in functions:
            patches.enter_context(patch.object(where, name, counted(name, getattr(where, name))))
        yield calls


@everyone
def test_a_request_looks_at_its_own_nodes_only(family: str) -> None:
    """And at those near the ones that go for it."""
    users = Users(family, 300)
    budget = users.cache.budget_bytes = users.cache.nbytes - 1
    counted = (PrefixTrie, "nodes"), (PrefixTrie, "remove"), (PrefixTrie, "merge"), (EvictionOrder, "weight")
    with counting(*counted) as calls:
        users.ask([1, 2, 3, *range(110, 115), *range(10, 30)])
    assert users.cache.nbytes < budget
    gone = calls.count("remove") + calls.count("merge")
    assert 0 < gone < 60
    assert calls.count("weight") <= 30 + 4 * gone < 300
    assert "nodes" not in calls


def two_conversations() -> TrieCache:
    """Returns a cache with two conversations whose layers a third one has taken."""
    model = deep()
    cache = TrieCache(model.facts)
    for seed in (2, 3, 4):
        ask(model, cache, words(60, seed), say=0, chunk=60)
    return cache


@contextmanager
def evaluations() -> Iterator[list[int]]:
    """Yields a list that grows by the number of arrays of each evaluation."""
    counts: list[int] = []
    original = mx.eval

    def counted(*arrays: object) -> None:
        counts.append(len(list(_flat(arrays))))
        original(*arrays)

    with patch.object(mx, "eval", counted):
        yield counts


def _flat(arrays: object) -> Iterator[mx.array]:
    if isinstance(arrays, mx.array):
        yield arrays
    elif isinstance(arrays, list | tuple):
        for each in arrays:
            yield from _flat(each)


def test_a_cut_computes_all_its_copies_at_once() -> None:
    cache = two_conversations()
    node = next(node for node in cache.trie.nodes() if node.nbytes)
    with evaluations() as counts:
        cache.trie.split(node, 30)
        assert counts == []
        cache.sequences.flush()
        assert counts == [LAYERS * 2 * 2]
        cache.sequences.flush()
        assert counts[1:] == [0]


def test_large_copies_are_computed_at_once() -> None:
    """Each while the others are whole: there is no room for all of it again."""
    cache = two_conversations()
    node = next(node for node in cache.trie.nodes() if node.nbytes)
    half = 30 * 64 * 4 * 2
    with patch.object(snapshot, "TOGETHER_BYTES", 2 * half - 1), evaluations() as counts:
        cache.trie.split(node, 30)
        assert counts == [4] * LAYERS


def test_a_conversation_comes_back_in_two_evaluations() -> None:
    """Of the copies of all that it overwrites, and of all layers: each evaluation waits for the device."""
    cache = two_conversations()
    with evaluations() as counts:
        session = cache.begin([*words(60, 2), 1])
    assert session.position == 60
    assert [count for count in counts if count] == [2 * LAYERS, 2 * LAYERS]


@contextmanager
def putting_off() -> Iterator[list[int]]:
    """The bytes of copies that were put off; all of them are computed when a forward comes."""
    sizes: list[int] = []
    later, page_out = Ledger.defer, SequenceLayers.page_out

    def counted(ledger: Ledger, copies: list[mx.array], sources: Sequence[mx.array] = ()) -> object:
        sizes.append(sum(copy.nbytes for copy in copies))
        return later(ledger, copies, sources)

    def checked(sequence: SequenceLayers) -> None:
        assert not sequence.totals.ledger.copies
        page_out(sequence)

    with patch.object(Ledger, "defer", counted), patch.object(SequenceLayers, "page_out", checked):
        yield sizes


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_next"])
def test_nothing_is_put_off_for_longer_than_a_step(kind: str) -> None:
    """Resumes within an edge, diverging conversations, checkpoints, and evictions."""
    model = tiny(kind)
    cache = TrieCache(model.facts, policy=Every(8))
    ledger = cache.sequences.totals.ledger
    with putting_off() as sizes:
        for seed in (2, 3, 4, 5):
            for prompt in (
                words(60, 2),
                [*words(60, 2)[:40], *words(30, seed)],
                [*words(60, seed)[:21], 1],
                words(50, seed),
            ):
                ask(model, cache, prompt, say=2, chunk=16)
                assert not ledger.copies
        assert sizes
        gone = len(sizes)
        while (held := cache.nbytes) > cache.sequences.layer_bytes:
            cache.budget_bytes = held - 1
            cache.enforce_budget()
            assert not ledger.copies
        assert kind != "qwen3_next" or len(sizes) > gone, "nothing was merged"


def test_what_is_cut_apart_shares_no_buffer() -> None:
    """MLX hands on a buffer that no other array holds if all of it but 16 KiB is wanted, and then all of it stays in
    memory: it did so where the first part was finished before the second one began."""
    with exact_memory():
        ledger, halves = Ledger(), []
        before = held_bytes()
        whole = mx.arange(16_000.0).reshape(1, 1, 1000, 16)
        mx.eval(whole)
        for part in (slice(0, 200), slice(200, 1000)):
            ledger.flush()
            mx.synchronize()
            halves.append(ledger.defer([own(whole[..., part, :])], [whole]))
        del whole
        ledger.flush()
        held = sum(half.arrays[0].nbytes for half in halves)
        assert held <= held_bytes() - before <= held + 4096


def test_a_salt_leaves_nothing_behind() -> None:
    """Once nothing of it is kept. One that is in use stays what it is."""
    model = tiny("llama")
    cache = TrieCache(model.facts)
    for salt in range(50):
        session = cache.begin([1, 2, 3], f"salt {salt}")
        assert cache.trie.root(f"salt {salt}") is session.node
        cache.follows([1, 2, 3], f"another {salt}")
        assert cache.trie.root(f"salt {salt}") is session.node
        session.close()
    assert len(cache.trie.roots) <= 2


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
