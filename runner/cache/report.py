"""Describes a cache in plain data, for the page, the metrics and tests: in numbers, and node by node.

Reading changes nothing: no node counts as used, nothing is copied or evaluated.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise

from protocol.stats import CacheCounts, CacheNode
from runner.cache.interface import CacheDescription, Spell
from runner.cache.layers.adapter import LayerState
from runner.cache.node import Node
from runner.cache.sequence import LayerFacts, SequenceLayers
from runner.cache.sequences import LiveSequences
from runner.cache.trie import PrefixTrie


def describe_trie(
    sequences: LiveSequences, trie: PrefixTrie, budget_bytes: int | None, reserved_bytes: int
) -> CacheDescription:
    """Describes a trie and the sequences over it; `reserved_bytes` are those of batches."""
    ledger, end = sequences.facts.ledger, sequences.end
    nodes = list(trie.nodes())
    mark = trie.now, ledger.count, ledger.nbytes, len(sequences.all), sum(node.stored for node in nodes)
    counts = _counts(sequences.facts, sequences.layer_bytes + reserved_bytes, len(nodes), budget_bytes)
    recorded_tokens = end.end if end else 0
    return CacheDescription(mark, counts, len(sequences.sessions), ledger.count, recorded_tokens, reserved_bytes)


def describe_sequence(
    facts: LayerFacts, sequence: SequenceLayers | None, recorded_tokens: int, open_session: bool
) -> CacheDescription:
    """Describes a cache of one sequence, which may be empty."""
    position = 0 if sequence is None else sequence.position
    mark = int(sequence is not None), recorded_tokens, position
    counts = _counts(facts, 0 if sequence is None else sequence.nbytes, int(position > 0), None)
    return CacheDescription(mark, counts, int(open_session), facts.ledger.count, recorded_tokens)


def trie_nodes(sequences: LiveSequences, trie: PrefixTrie, spell: Spell | None, most: int) -> list[CacheNode]:
    """Returns the nodes of a trie as `PrefixCache.nodes` promises."""
    used = sorted(sequences.facts.used)
    sizes, now = _sizes(sequences.all, used), trie.now
    requests = Counter(node for session in sequences.sharing for node in session.node.path())
    return [_described(node, now, requests[node], used, sizes, spell) for node in _latest(trie, most)]


def sequence_node(
    facts: LayerFacts, sequence: SequenceLayers | None, recorded: Sequence[int], spell: Spell | None
) -> list[CacheNode]:
    """Returns one node for the sequence, or nothing. `recorded` is empty while a session writes into the layers."""
    if sequence is None or not sequence.position:
        return []
    live_bytes, layers = sequence.nbytes, len(facts.used)
    in_use = not recorded
    return [
        CacheNode(
            id=0,
            parent=None,
            start=0,
            end=sequence.position,
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
            media=_items(recorded),
            text=spell(recorded) if spell is not None and not in_use else None,
        )
    ]


def _counts(facts: LayerFacts, live_bytes: int, nodes: int, budget_bytes: int | None) -> CacheCounts:
    paged_bytes = facts.ledger.nbytes
    return CacheCounts(
        budget_bytes=budget_bytes,
        held_bytes=live_bytes + paged_bytes,
        live_bytes=live_bytes,
        paged_bytes=paged_bytes,
        evicted_bytes=facts.evicted_bytes,
        restored_bytes=facts.restored_bytes,
        nodes=nodes,
        evictions=facts.evictions,
    )


def _sizes(sequences: Collection[SequenceLayers], used: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Returns the size of each slot. All sequences are alike: any that holds something speaks for the others."""
    full = next((sequence for sequence in sequences if sequence.position), None)
    return {slot: _size(full.states[slot]) for slot in used} if full is not None else {}


def _size(state: LayerState) -> tuple[int, int]:
    """Returns the bytes that a layer holds of each token, and those of a state."""
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
    """Returns the number of items of media among these tokens: names are negative, and fill an item's whole place."""
    if not tokens or min(tokens) >= 0:
        return 0
    return int(tokens[0] < 0) + sum(token < 0 and token != before for before, token in pairwise(tokens))


def _latest(trie: PrefixTrie, most: int) -> list[Node]:
    """Returns about `most` nodes, the most recently used and their ancestors; parents before their children."""
    every = list(trie.nodes())
    if len(every) <= most:
        return every
    chosen: set[Node] = set()
    for node in sorted(every, key=lambda node: node.used, reverse=True):
        if len(chosen) >= most:
            break
        chosen.update(node.path()[1:])
    return [node for node in every if node in chosen]
