"""Finds the largest offset along a path of the trie at which all layers can stand, and brings the layers there.

A layer can stand at an offset if it can rewind to this offset, or if the nodes hold, without a gap, the tokens that the
layer needs there. A sliceable layer needs all tokens after the common prefix of its buffers and the path; a layer with
a tail needs the last tokens; any other layer needs a state. The offset is found before any layer moves, so that no
layer has to move back.
"""

from collections.abc import Collection, Sequence
from itertools import takewhile

from runner.cache.layer_interface import Miss, Snapshot
from runner.cache.layers.adapter import LayerState
from runner.cache.node import Node, spelled
from runner.cache.sequence import SequenceLayers
from runner.cache.trie import PrefixTrie


def shared_tokens(path: Sequence[Node], matched: int, end: Node | None) -> int:
    """Returns the number of matched tokens in layers that stand at `end`, or 0 if this is None."""
    live = set(end.path()) if end else set()
    shared = [node.end for node in path if node in live]
    return min(max(shared, default=0), matched)


def deepest_offset(sequence: SequenceLayers, path: Sequence[Node], matched: int, shared: int) -> tuple[int, Miss]:
    """Returns the largest offset up to `matched` at which every layer can stand, and the reason if it is less. `path`
    leads from a root along the matched tokens; its last node may extend beyond these tokens. The layers hold the first
    `shared` tokens of the path already."""
    why = Miss.NONE
    for count in range(len(path), 0, -1):
        way, at = path[:count], min(matched, path[count - 1].end)
        refusal = next(
            (state.refusal for slot, state in sequence.used if not _reaches(state, slot, way, at, shared)), None
        )
        if at == 0 or refusal is None:
            return at, why
        why = why or refusal
    return 0, why


def restore_to(sequence: SequenceLayers, path: Sequence[Node], at: int, shared: int) -> None:
    """Brings every layer to `at`. `deepest_offset` must have returned `at`, and a node of the path must end there."""
    if at == 0:
        sequence.reset()
        return
    if at > shared or at != sequence.offset:
        sequence.page_out_unsliceable()
    missing: list[tuple[LayerState, Sequence[Snapshot]]] = []
    for slot, state in sequence.used:
        if at <= shared and state.can_rewind(at):
            state.rewind(at)
            continue
        begin = state.needs(at)
        if state.sliceable:
            begin = min(at, shared)
            state.rewind(begin)
        wanted = [held for node in path if begin < node.end <= at and (held := _held(node, slot)) is not None]
        sequence.totals.restored_bytes += sum(held.nbytes for held in wanted)
        there = [*takewhile(state.live.__contains__, wanted)] if state.sliceable else []
        if there:
            state.restore(there)
        if there != wanted:
            missing.append((state, wanted[len(there) :]))
    sequence.restore(missing)
    sequence.position = at


def truncate(sequence: SequenceLayers, trie: PrefixTrie, end: Node, budget_bytes: int) -> Node:
    """Shortens the conversation in the layers, which stand at `end`, to a beginning that fits the budget, and removes
    all other nodes from the trie. Returns the node where the layers stand afterwards. All nodes must be unlocked."""
    path, matched = trie.match(end.path()[0], spelled(end.path())[: sequence.tokens_within(budget_bytes)])
    held = shared_tokens(path, matched, end)
    at, _ = deepest_offset(sequence, path, matched, held)
    path = trie.cut(path, at)
    for node in reversed(list(trie.nodes())):
        if node.parent is not None and (node.end > at or node not in path):
            trie.remove(node)
    restore_to(sequence, path, at, held)
    sequence.trim(0)
    return next(node for node in path if node.end == at)


def store_snapshots(sequence: SequenceLayers, node: Node) -> None:
    """Stores snapshots of a node's tokens in the node. The layers must have seen these tokens. Of sliceable layers,
    live snapshots replace stored ones. A layer that is not sliceable adds a snapshot only if it stands at the end of
    the node, and without the tokens that ancestors of the node hold."""
    if node.parent is None:
        return
    node.slots = node.slots or [None] * len(sequence.states)
    path = node.path()
    for slot, state in sequence.used:
        held, start = node.slots[slot], node.start
        if state.sliceable:
            wanted = held is None or not held.live
        else:
            needed = state.needs(node.end)
            wanted = held is None or not covers(path, slot, needed, node.end)
            if not covers(path[:-1], slot, needed, start):
                start = min(needed, start)
        live = state.snapshot(start, node.end) if wanted else None
        if live is not None:
            node.slots[slot] = live
            if held is not None:
                held.close()


def replace_copies(sequence: SequenceLayers, node: Node) -> None:
    """Replaces the snapshots of a node that own bytes by live snapshots. The layers must stand at the node's end."""
    for slot, state in sequence.used if node.slots else ():
        held = node.slots[slot]
        if held is not None and not held.live:
            node.slots[slot] = state.snapshot(state.needs(node.end), node.end)
            held.close()


def make_live(sequence: SequenceLayers, node: Node, left: Collection[Snapshot] | None = None) -> None:
    """Makes snapshots of a node live in these sliceable layers, which hold all tokens up to the node's end. Copies
    nothing. If `left` is given (the live snapshots of layers that are about to be reset), changes only these and
    missing snapshots."""
    if node.parent is None:
        return
    node.slots = node.slots or [None] * len(sequence.states)
    for slot, state in sequence.used:
        held = node.slots[slot]
        if state.sliceable and (held is None or (held not in state.live if left is None else held in left)):
            node.slots[slot] = state.snapshot(node.start, node.end)
            if held is not None:
                held.close()


def covers(path: Sequence[Node], slot: int, begin: int, end: int) -> bool:
    """Returns True if the snapshots on a path hold the tokens [begin, end) of one layer without a gap."""
    for node in reversed(path):
        if end <= begin:
            return True
        if node.start >= end:
            continue
        held = _held(node, slot)
        if held is None or held.start > max(begin, node.start):
            return False
        end = held.start
    return end <= begin


def _reaches(state: LayerState, slot: int, path: Sequence[Node], at: int, shared: int) -> bool:
    if at <= shared and state.can_rewind(at):
        return True
    return covers(path, slot, shared if state.sliceable else state.needs(at), at)


def _held(node: Node, slot: int) -> Snapshot | None:
    return node.slots[slot] if slot < len(node.slots) else None
