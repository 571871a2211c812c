"""What a cache holds, for the eyes of people: numbers, and the trie node by node.

Whoever looks changes nothing: no node counts as used, nothing is copied, computed or settled.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from protocol.stats import CacheCounts, CacheNode
from runner.cache.interface import LayerState
from runner.cache.layer_facts import LayerFacts
from runner.cache.sequence import SequenceLayers
from runner.cache.trie import Node, PrefixTrie

_MOST_NODES = 1000
Spell = Callable[[Sequence[int]], str]
"""The beginning of the text of these tokens."""


class Parts(NamedTuple):
    """What a cache is made of. Nobody keeps it: it is that of one moment between two slices."""

    facts: LayerFacts
    sequences: Collection[SequenceLayers]
    trie: PrefixTrie | None = None
    record: Sequence[int] = ()
    """Without a trie: what the layers hold, as far as no open session writes into them."""
    budget_bytes: int | None = None
    reserved_bytes: int = 0
    """Of batches, beside the layers of their sessions."""


def mark(parts: Parts) -> tuple[int, ...]:
    """Another one wherever the picture may be another one. Costs next to nothing, whatever the cache holds."""
    ledger = parts.facts.ledger
    if parts.trie is not None:
        return parts.trie.now, ledger.count, ledger.nbytes, len(parts.sequences)
    return len(parts.sequences), len(parts.record), *(sequence.position for sequence in parts.sequences)


def counts(parts: Parts, misses: dict[str, int]) -> CacheCounts:
    """How much there is. `misses` are the requests that found less than they might have, by the reason."""
    live = sum(sequence.nbytes for sequence in parts.sequences) + parts.reserved_bytes
    paged = parts.facts.ledger.nbytes
    return CacheCounts(
        budget_bytes=parts.budget_bytes,
        held_bytes=live + paged,
        live_bytes=live,
        paged_bytes=paged,
        evicted_bytes=parts.facts.evicted_bytes,
        restored_bytes=parts.facts.restored_bytes,
        nodes=sum(1 for _ in parts.trie.nodes()) if parts.trie is not None else int(_lone_tokens(parts) > 0),
        evictions=parts.facts.evictions,
        misses=misses,
    )


def nodes(parts: Parts, spell: Spell | None = None, most: int = _MOST_NODES) -> list[CacheNode]:
    """The trie, parents before their children; a cache of one sequence as one node. Without `spell` no text.

    Of a trie with more than `most` nodes about as many that were of use last: a node takes some microseconds.
    """
    if parts.trie is None:
        return _lone(parts, spell)
    used = sorted(parts.facts.used)
    sizes, now = _sizes(parts, used), parts.trie.now
    return [_drawn(node, now, used, sizes, spell) for node in _latest(parts.trie, most)]


class _Size(NamedTuple):
    """What a layer takes: bytes for each token, and whatever it holds of them."""

    token_bytes: int
    state_bytes: int


_NOTHING = _Size(0, 0)


def _sizes(parts: Parts, used: Sequence[int]) -> dict[int, _Size]:
    """Of each slot. All stacks are alike: one that holds anything says it for the others."""
    full = next((sequence for sequence in parts.sequences if sequence.position), None)
    return {slot: _size(full.states[slot]) for slot in used} if full is not None else {}


def _size(state: LayerState) -> _Size:
    if state.whole:
        return _Size(0, state.nbytes)
    return _Size(sum(array.nbytes // max(1, array.shape[-2]) for array in state.arrays()), 0)


def _drawn(node: Node, now: int, used: Sequence[int], sizes: dict[int, _Size], spell: Spell | None) -> CacheNode:
    slots, parent = node.slots, node.parent
    live = paged = live_bytes = paged_bytes = 0
    for slot in used if slots else ():
        held = slots[slot]
        if held is None:
            continue
        if held.live:
            live += 1
            size = sizes.get(slot, _NOTHING)
            live_bytes += size.token_bytes * (held.stop - held.start) + size.state_bytes
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
        locks=node.locks,
        restore_point=node.restore_point,
        text=spell(node.tokens) if spell is not None else None,
    )


def _latest(trie: PrefixTrie, most: int) -> list[Node]:
    """About so many of the nodes, those that were of use last and the way to them; parents before their children."""
    every = list(trie.nodes())
    if len(every) <= most:
        return every
    chosen: set[Node] = set()
    for node in sorted(every, key=lambda node: node.used, reverse=True):
        if len(chosen) >= most:
            break
        chosen.update(node.path()[1:])
    return [node for node in every if node in chosen]


def _lone_tokens(parts: Parts) -> int:
    return max((sequence.position for sequence in parts.sequences), default=0)


def _lone(parts: Parts, spell: Spell | None) -> list[CacheNode]:
    end = _lone_tokens(parts)
    if not end:
        return []
    live_bytes, layers = sum(sequence.nbytes for sequence in parts.sequences), len(parts.facts.used)
    in_use = not parts.record
    return [
        CacheNode(
            id=0,
            parent=None,
            start=0,
            end=end,
            bytes=live_bytes,
            live_bytes=live_bytes,
            paged_bytes=0,
            layers=layers,
            live_layers=layers,
            paged_layers=0,
            missing_layers=0,
            idle_uses=0,
            locks=int(in_use),
            restore_point=False,
            text=spell(parts.record) if spell is not None and not in_use else None,
        )
    ]
