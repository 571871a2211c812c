"""Describes a prefix cache in plain data: counts and nodes. A description does not mark the nodes as used."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from protocol.stats import CacheCounts, CacheNode
from runner.cache import PrefixCache
from runner.cache.layers.adapter import LayerState
from runner.cache.node import Node
from runner.cache.sequence import SequenceLayers, Totals
from runner.cache.single import SingleEntryCache
from runner.cache.trie import PrefixTrie
from runner.cache.trie_cache import TrieCache

Spell: TypeAlias = Callable[[Sequence[int]], str]
"""Returns the first characters of the text of some tokens."""


class CacheDescription(NamedTuple):
    """A cache at one moment."""

    mark: tuple[int, ...]
    """A value that differs between two moments if the results of `cache_nodes` may differ."""
    counts: CacheCounts
    """The counts of the cache. `misses` is empty, since the journal counts these."""


def describe_cache(cache: PrefixCache) -> CacheDescription:
    """Returns the counts and the mark of a cache."""
    if isinstance(cache, TrieCache):
        sequences, trie, ledger = cache.sequences, cache.trie, cache.sequences.totals.ledger
        nodes = list(trie.nodes())
        mark = trie.now, ledger.count, ledger.nbytes, len(sequences.all), sum(node.stored for node in nodes)
        running_bytes = sum(session.sequence.nbytes for session in sequences.sessions) + cache.reserved_bytes
        return CacheDescription(mark, _counts(cache, sequences.totals, len(nodes), running_bytes, cache.budget_bytes))
    assert isinstance(cache, SingleEntryCache)
    position = 0 if cache.sequence is None else cache.sequence.position
    state = int(cache.sequence is not None), len(cache.tokens), position
    running_bytes = 0 if cache.tokens else cache.nbytes
    return CacheDescription(state, _counts(cache, cache.totals, int(position > 0), running_bytes, None))


def cache_nodes(cache: PrefixCache, spell: Spell | None = None, most: int = 1000) -> list[CacheNode]:
    """Returns the nodes of the trie, parents before their children, or at most one node for a cache of one sequence.
    Without `spell`, the nodes have no text.

    Of a larger trie, returns about `most` nodes: the most recently used. Each takes a few microseconds.
    """
    if isinstance(cache, TrieCache):
        sequences, now = cache.sequences, cache.trie.now
        used = sorted(sequences.facts.used)
        sizes = _sizes(sequences.all, used)
        requests = Counter(node for session in sequences.sharing for node in session.node.path())
        return [_described(node, now, requests[node], used, sizes, spell) for node in _latest(cache.trie, most)]
    assert isinstance(cache, SingleEntryCache)
    recorded, layers = cache.tokens, len(cache.facts.used)  # `tokens` are empty while a session uses the layers
    if cache.sequence is None or not cache.sequence.position:
        return []
    return [
        CacheNode(
            id=0,
            end=cache.sequence.position,
            bytes=cache.nbytes,
            live_bytes=cache.nbytes,
            layers=layers,
            live_layers=layers,
            locks=int(not recorded),
            media=_items(recorded),
            text=spell(recorded) if spell is not None and recorded else None,
        )
    ]


def _counts(
    cache: PrefixCache, totals: Totals, nodes: int, running_bytes: int, budget_bytes: int | None
) -> CacheCounts:
    held_bytes, paged_bytes = cache.nbytes, cache.paged_bytes
    return CacheCounts(
        budget_bytes=budget_bytes,
        held_bytes=held_bytes,
        live_bytes=held_bytes - paged_bytes,
        paged_bytes=paged_bytes,
        running_bytes=running_bytes,
        checkpoint_bytes=totals.ledger.checkpoint_bytes,
        evicted_bytes=totals.evicted_bytes,
        restored_bytes=totals.restored_bytes,
        nodes=nodes,
        evictions=totals.evictions,
    )


def _sizes(sequences: Collection[SequenceLayers], used: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Returns slot -> (bytes of the layer for each token, bytes of its state). Empty if no layers hold tokens."""
    full = next((sequence for sequence in sequences if sequence.position), None)
    return {slot: _size(full.states[slot]) for slot in used} if full is not None else {}


def _size(state: LayerState) -> tuple[int, int]:
    if state.whole:
        return 0, state.nbytes
    return sum(array.nbytes // max(1, array.shape[-2]) for array in state.arrays()), 0


def _described(
    node: Node, now: int, requests: int, used: Sequence[int], sizes: dict[int, tuple[int, int]], spell: Spell | None
) -> CacheNode:
    slots, parent = node.slots, node.parent
    live = paged = live_bytes = paged_bytes = 0
    for slot in used if slots else ():
        held = slots[slot]
        if held is None:
            continue
        if held.live:
            live += 1
            token_bytes, state_bytes = sizes.get(slot, (0, 0))
            live_bytes += token_bytes * (held.stop - held.start) + state_bytes
        else:
            paged += 1
            paged_bytes += held.nbytes
    return CacheNode(
        id=id(node),
        parent=id(parent) if parent is not None and parent.parent is not None else None,
        start=node.start,
        end=node.end,
        bytes=live_bytes + paged_bytes,
        live_bytes=live_bytes,
        paged_bytes=paged_bytes,
        layers=len(used),
        live_layers=live,
        paged_layers=paged,
        missing_layers=len(used) - live - paged,
        idle_uses=now - node.used,
        locks=requests,
        restore_point=node.checkpoint,
        stored=node.stored,
        restored=node.restored,
        media=_items(node.tokens),
        text=spell(node.tokens) if spell is not None else None,
    )


def _items(tokens: Sequence[int]) -> int:
    """Returns the number of media items in tokens. An item is a run of one negative token, the item's name."""
    if not tokens or min(tokens) >= 0:
        return 0
    return int(tokens[0] < 0) + sum(token < 0 and token != before for before, token in pairwise(tokens))


def _latest(trie: PrefixTrie, most: int) -> list[Node]:
    """Returns about `most` nodes: the most recently used and their ancestors. Parents stand before their children."""
    every = list(trie.nodes())
    if len(every) <= most:
        return every
    chosen: set[Node] = set()
    for node in sorted(every, key=lambda node: node.used, reverse=True):
        if len(chosen) >= most:
            break
        chosen.update(node.path()[1:])
    return [node for node in every if node in chosen]
