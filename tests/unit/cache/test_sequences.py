"""The owners of layers: a sequence for each open session, and one that is kept between them. Over fake layers.

`test_trie_together` tests sequences within requests; here each method is tested by itself.
"""

from collections.abc import Sequence

import pytest

from runner.cache import resume
from runner.cache.interface import Match
from runner.cache.node import Node, keys
from runner.cache.sequence import SequenceLayers
from runner.cache.sequences import LiveSequences
from runner.cache.trie import PrefixTrie
from runner.cache.trie_session import TrieSession
from tests.lib.fakes import FAMILIES, FakeLayer

TOKENS = list(range(1, 9))
everyone = pytest.mark.parametrize("family", FAMILIES)


class World:
    """Stacks over a trie, without a cache."""

    def __init__(self, family: str) -> None:
        self.sequences = LiveSequences(lambda: [kind() for kind in FAMILIES[family]])
        self.trie = PrefixTrie()

    def open(self, tokens: Sequence[int]) -> TrieSession:
        """A session that has read all of its prompt and kept it."""
        sequence, end = self.sequences.acquire()
        assert end is None
        see(sequence, tokens)
        node = self.keep(sequence, tokens)
        session = TrieSession(sequence, [*tokens], Match(0, 0), node, PrefixTrie(), lambda *_: None, lambda *_: None)
        self.sequences.sessions.append(session)
        return session

    def close(self, session: TrieSession) -> None:
        self.sequences.sessions.remove(session)
        self.sequences.release(session.sequence, session.node)

    def keep(self, sequence: SequenceLayers, tokens: Sequence[int]) -> Node:
        root = self.trie.root()
        for node in self.trie.advance(root, keys(tokens)):
            resume.capture(sequence, node)
        return self.trie.match(root, keys(tokens)).path[-1]

    def homes(self, node: Node) -> list[bool | None]:
        """Of each slot of a node whether it is live; None where nothing is held."""
        return [None if slot is None else slot.live for slot in node.slots]


def see(sequence: SequenceLayers, tokens: Sequence[int]) -> None:
    sequence.page_out()
    for layer in sequence.layers:
        assert isinstance(layer, FakeLayer)
        layer.see(tokens)
    sequence.advance(len(tokens))


@everyone
def test_the_kept_sequence_is_acquired_once(family: str) -> None:
    world = World(family)
    kept = world.sequences.kept
    assert world.sequences.idle
    first = world.open(TOKENS)
    assert first.sequence is kept
    assert not world.sequences.idle
    assert world.open([1, 2, 90]).sequence is not kept
    world.sequences.sessions.pop()
    world.close(first)
    assert (world.sequences.kept, world.sequences.end, world.sequences.idle) == (kept, first.node, True)
    assert world.sequences.acquire() == (kept, first.node)
    assert world.sequences.end is None


@everyone
def test_a_kept_sequence_replaces_the_previous_one(family: str) -> None:
    world = World(family)
    first, second = world.open(TOKENS), world.open([90, 91, 92])
    world.close(first)
    assert world.homes(first.node) == [True, True]
    world.close(second)
    assert (world.sequences.kept, world.sequences.end) == (second.sequence, second.node)
    assert world.homes(first.node) == [False, False], "copied out"
    assert world.homes(second.node) == [True, True]
    assert (first.sequence.position, first.sequence.nbytes) == (0, 0)


@everyone
def test_the_same_sequence_is_kept_again(family: str) -> None:
    world = World(family)
    first = world.open(TOKENS)
    world.close(first)
    sequence, end = world.sequences.acquire()
    assert end is not None
    world.sequences.release(sequence, end)
    assert world.homes(end) == [True, True]
    assert sequence.position == len(TOKENS)


@everyone
def test_a_former_one_in_use_is_left_alone(family: str) -> None:
    world = World(family)
    first, second = world.open(TOKENS), world.open([90, 91, 92])
    world.close(second)
    assert world.sequences.kept is second.sequence
    assert (first.sequence.position, world.homes(first.node)) == (len(TOKENS), [True, True])


@everyone
def test_what_others_hold_is_live_there(family: str) -> None:
    """Of two that hold the same eight tokens, one is given up: slices are live in the other, states are copied out."""
    world = World(family)
    first = world.open(TOKENS)
    second = world.open([*TOKENS, 7])
    assert set(first.sequence.live()) > set()
    left = world.sequences.hand_over_shared(first.sequence)
    slices = [state.sliceable for state in first.sequence.states]
    assert len(left) == slices.count(False)
    shared = [slot for slot, sliceable in zip(first.node.slots, slices, strict=True) if sliceable]
    assert all(slot in second.sequence.live() for slot in shared)
    assert all(node.parent or not node.slots for node in first.node.path())
    world.sequences.sessions.remove(first)
    first.sequence.reset()
    assert world.homes(first.node) == slices


@everyone
def test_the_kept_one_takes_over_too(family: str) -> None:
    world = World(family)
    first, second = world.open(TOKENS), world.open([*TOKENS, 7])
    world.close(second)
    left = world.sequences.hand_over_shared(first.sequence)
    assert len(left) == [state.sliceable for state in first.sequence.states].count(False)


@pytest.mark.parametrize("family", ["K", "S", "R"])
def test_a_detached_session_takes_over_nothing(family: str) -> None:
    world = World(family)
    first, second = world.open(TOKENS), world.open([*TOKENS, 7])
    second.detached = True
    assert world.sequences.sharing == [first]
    live = first.sequence.live()
    assert world.sequences.hand_over_shared(first.sequence) == live


@pytest.mark.parametrize("family", ["K", "S", "R"])
def test_a_gap_is_filled_by_a_session_that_holds_it(family: str) -> None:
    world = World(family)
    first, second = world.open(TOKENS), world.open([*TOKENS, 7])
    held = first.node.slots[0]
    assert held is not None
    held.close()
    first.node.slots[0] = None
    world.sequences.hand_over_shared(first.sequence)
    assert first.node.slots[0] in second.sequence.live()


@everyone
def test_bytes_count_every_sequence_once(family: str) -> None:
    world = World(family)
    first, second = world.open(TOKENS), world.open([90, 91, 92])
    each = first.sequence.nbytes, second.sequence.nbytes
    assert world.sequences.nbytes == sum(each)
    world.close(first)
    assert world.sequences.nbytes == sum(each)
    world.close(second)
    assert world.sequences.nbytes == each[1] + world.sequences.facts.ledger.nbytes
    assert world.sequences.facts.ledger.nbytes == sum(node.nbytes for node in first.node.path()) > 0


@everyone
def test_evicting_the_kept_sequence_empties_it(family: str) -> None:
    world = World(family)
    first = world.open(TOKENS)
    world.close(first)
    world.sequences.evict_kept()
    assert (world.sequences.end, world.sequences.kept.nbytes, world.sequences.kept.position) == (None, 0, 0)
    assert world.homes(first.node) == [False, False]


@everyone
@pytest.mark.parametrize("idle", [True, False])
def test_a_reset_frees_all_but_open_sessions(family: str, idle: bool) -> None:
    world = World(family)
    first, second = world.open(TOKENS), world.open([90, 91, 92])
    if idle:
        world.close(first)
    kept, facts = world.sequences.kept, world.sequences.facts
    ledger = facts.ledger
    world.trie.clear()
    world.sequences.detach_sessions()
    assert second.detached
    assert first.detached != idle
    assert world.sequences.sharing == []
    assert world.sequences.kept is not kept
    assert (world.sequences.end, world.sequences.kept.nbytes) == (None, 0)
    assert world.sequences.facts is facts
    assert facts.ledger is not ledger
    assert (facts.ledger.count, ledger.count, ledger.nbytes) == (0, 0, 0)
    assert kept.position == (0 if idle else len(TOKENS)) or kept.nbytes == 0
    see(second.sequence, [5])
    assert second.sequence.position == 4
