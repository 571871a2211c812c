"""Puts what another process has computed, read from disk, into the trie. Owner: the engine thread.

Nodes are made and filled here, and no layer moves: what a prompt can use of them is decided by the trie, as ever.
"""

from typing import cast

import mlx.core as mx

from runner.cache.disk.name import ENTRIES
from runner.cache.disk.segment import Facts, Record, Segment, SegmentError
from runner.cache.layer_interface import Snapshot
from runner.cache.layers.cargo import adopted, array_in, array_of, describe, is_tail
from runner.cache.layers.snapshot import own
from runner.cache.node import Tokens
from runner.cache.resume import deepest_offset, shared_tokens
from runner.cache.trie_cache import TrieCache


def standing(cache: TrieCache, tokens: Tokens, salt: str) -> int:
    """Returns the tokens of a prompt that would come from the cache if it began now. Changes nothing."""
    sequences = cache.sequences
    path, matched = cache.trie.match(cache.trie.root(salt), tokens)
    branch = min(matched, len(tokens) - 1)
    if path[-1].start == branch < matched:
        path.pop()
    sequence, end = (sequences.kept, sequences.end) if sequences.idle else (sequences.fresh(), None)
    return deepest_offset(sequence, path, branch, shared_tokens(path, branch, end))[0]


def adopt(cache: TrieCache, prefix: Tokens, salt: str, segment: Segment) -> bool:
    """Puts a segment into the trie. `prefix` are the tokens from the first one to the end of the segment.

    The reader has compared it with the layers. Returns False, and leaves all as it was, if what it follows is not there
    or there is no room for it. Raises SegmentError if a layer is kept in another form by now. Adopted nodes count as
    just used.
    """
    facts, name = segment.facts, segment.name
    _learn(cache, facts)
    nbytes = sum(tensor.nbytes for record in facts.records for tensor in record.tensors)
    fits = _make_room(cache, nbytes)  # first: what it evicts may be a part of the way
    root, sequences = cache.trie.root(salt), cache.sequences
    _, matched = cache.trie.match(root, prefix)
    entries = name.kind == ENTRIES
    if entries and matched >= name.stop:
        return True
    needed = name.start if entries else name.stop if any(state.sliceable for _, state in sequences.kept.used) else 0
    if not fits or matched < needed:
        return False
    held = _snapshots(cache, segment, matched)
    node = cache.trie.advance(root, prefix)[-1]
    node.slots = node.slots or [None] * len(sequences.kept.states)
    for slot, snapshot in held.items():
        if node.slots[slot] is None:
            node.slots[slot] = snapshot
        else:
            snapshot.close()
    node.restored = True
    if entries:
        node.stored = len(node.tokens)
    node.checkpoint |= facts.checkpoint
    sequences.flush()
    cache.enforcer.touch(node)
    cache.enforce_budget()
    return node.parent is not None


def buffer_like(segment: Segment) -> memoryview:
    """Returns the bytes of a new array, as many as this segment has. A segment that is read into it is adopted without
    a copy: new pages cost several times what reading into them does."""
    buffer = mx.empty((len(segment.data),), mx.uint8)
    mx.eval(buffer)
    return memoryview(cast("bytes", buffer))


def _make_room(cache: TrieCache, nbytes: int) -> bool:
    """Evicts what was not used lately until so many bytes fit. Returns False if they cannot."""
    budget_bytes = cache.budget_bytes
    if budget_bytes is None:
        return True
    cache.enforcer.enforce(budget_bytes, cache.reserved_bytes + nbytes, 0)
    return cache.nbytes + nbytes <= budget_bytes


def _learn(cache: TrieCache, facts: Facts) -> None:
    """Learns from another process what the first forward shows: which layers the model uses, which of them count
    something else than tokens, and what a token takes. Until it is known which layers are used, the trie would think
    that none is needed. Raises SegmentError if this process knows better which layers count otherwise."""
    sequences, known = cache.sequences, cache.sequences.facts
    states, distrusted = sequences.kept.states, set[int]()
    for slot, described in facts.layers.items():
        if describe(states[int(slot)]) != described:
            if describe(states[int(slot)], distrusted=True) != described:
                raise SegmentError("layers")
            distrusted.add(int(slot))
    known.used.update(map(int, facts.layers))
    if distrusted:
        known.untrusted.update(distrusted)
        cache.heed_distrust()
    tokens, nbytes = (
        facts.tokens,
        {record.slot: sum(each.nbytes for each in record.tensors) for record in facts.records},
    )
    if tokens:
        known.token_bytes = known.token_bytes or sum(nbytes.values()) // tokens
        return
    tails = sum(size for slot, size in nbytes.items() if is_tail(states[slot]))
    known.tail_bytes = max(known.tail_bytes, tails)
    known.state_bytes = max(known.state_bytes, sum(nbytes.values()) - tails)


def _arrays(segment: Segment, index: int) -> list[mx.array]:
    """Returns the arrays of a record, not evaluated."""
    tensors, buffer = segment.facts.records[index].tensors, segment.data.obj
    if isinstance(buffer, mx.array):
        spans = zip(segment.spans(index), tensors, strict=True)
        return [array_in(buffer, span.start, tensor.dtype, tensor.shape) for span, tensor in spans]
    parts = zip(segment.arrays(index), tensors, strict=True)
    return [array_of(data, tensor.dtype, tensor.shape) for data, tensor in parts]


def _snapshots(cache: TrieCache, segment: Segment, matched: int) -> dict[int, Snapshot]:
    """Returns the snapshots of all records, by slot; of entries, those from `matched` on."""
    held: dict[int, Snapshot] = {}
    states, found = cache.sequences.kept.states, list[tuple[Record, int, list[mx.array]]]()
    try:
        for index, record in enumerate(segment.facts.records):
            start, arrays = record.start, _arrays(segment, index)
            if states[record.slot].sliceable and start < matched:
                arrays, start = [own(array[..., matched - start :, :]) for array in arrays], matched
            found.append((record, start, arrays))
        mx.eval([arrays for _, _, arrays in found])  # at once: each evaluation takes a while, whatever its size
        for record, start, arrays in found:
            state = states[record.slot]
            held[record.slot] = adopted(state, start, segment.name.stop, arrays, record.content)
    except BaseException:
        for snapshot in held.values():
            snapshot.close()
        raise
    return held
