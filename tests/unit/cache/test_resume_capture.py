"""Snapshots that stay at nodes or move into layers, over real layers whose entries carry their positions."""

import pytest

import runner.process.lean_mlx_lm  # noqa: F401
from runner.cache import resume
from runner.cache.interface import Miss
from runner.cache.layers.snapshot import complete
from runner.cache.node import Node, keys
from runner.cache.sequence import SequenceLayers
from runner.cache.trie import PrefixTrie

from mlx_lm.models.cache import KVCache  # isort: skip

from tests.lib.layer_caches import KINDS, append, held, positions


class Way:
    """Real layers over a path of a trie: keys and values, a window of 8 tokens, a state."""

    def __init__(self) -> None:
        self.sequence = SequenceLayers([make() for make in (KVCache, KINDS["window"], KINDS["arrays"])])
        self.trie = PrefixTrie()

    def write(self, count: int) -> None:
        """A forward over tokens that carry their positions."""
        self.sequence.page_out()
        for state in self.sequence.states:
            append(vars(state)["layer"], positions(self.sequence.offset, count))
        self.sequence.advance(count)
        self.sequence.evaluate()

    def along(self, *ends: int) -> list[Node]:
        """Forwards up to these offsets, each of which ends a node that is filled then."""
        nodes, node = [], self.trie.root()
        for end in ends:
            self.write(end - node.end)
            (node,) = self.trie.advance(node, keys(range(node.end, end)))
            resume.capture(self.sequence, node)
            nodes.append(node)
        return nodes

    def back(self, node: Node) -> None:
        """After something else was read, all layers stand at the end of a node again."""
        self.sequence.reset()
        self.write(3)
        path = node.path()
        assert resume.deepest_offset(self.sequence, path, node.end, 0) == (node.end, Miss.NONE)
        resume.restore_to(self.sequence, path, node.end, 0)
        for state in self.sequence.states:
            assert held(state) == list(
                range(state.needs(node.end) if state is self.sequence.states[1] else 0, node.end)
            )

    def drop(self, node: Node, slot: int) -> None:
        piece = node.slots[slot]
        assert piece is not None
        piece.close()
        node.slots[slot] = None


def extents(node: Node) -> list[tuple[int, int] | None]:
    """Returns the spans of the snapshots of a node; None for an empty slot."""
    return [(piece.start, piece.stop) if piece else None for piece in node.slots]


def test_a_node_keeps_its_own_tokens_and_the_state_at_its_end() -> None:
    way = Way()
    first, second, third = way.along(5, 9, 30)
    assert extents(first) == [(0, 5), (0, 5), (4, 5)]
    assert extents(second) == [(5, 9), (5, 9), (8, 9)]
    assert extents(third) == [(9, 30), (22, 30), (29, 30)]
    assert way.sequence.ledger.count == 9
    assert [piece.live for piece in second.slots if piece] == [True, False, False]
    assert [piece.live for piece in third.slots if piece] == [True] * 3
    for node in (second, first, third):
        way.back(node)


def test_a_root_keeps_nothing() -> None:
    way = Way()
    (first,) = way.along(5)
    root = first.path()[0]
    resume.capture(way.sequence, root)
    resume.return_to_layers(way.sequence, root)
    assert root.slots == []


def test_a_node_that_was_passed_keeps_slices_only() -> None:
    way = Way()
    way.write(9)
    first, second = (
        *way.trie.advance(way.trie.root(), keys(range(5))),
        *way.trie.advance(way.trie.root(), keys(range(9)))[1:],
    )
    for node in (first, second):
        resume.capture(way.sequence, node)
    assert extents(first) == [(0, 5), None, None]
    assert extents(second) == [(5, 9), (1, 9), (8, 9)]  # the window has nothing above to lean on


def test_what_a_node_has_is_not_taken_again() -> None:
    way = Way()
    *_, last = way.along(5, 9)
    for _ in range(2):
        before = list(last.slots)
        resume.capture(way.sequence, last)
        assert last.slots == before
        way.back(last)


def test_a_window_is_taken_whole_where_those_above_have_a_gap() -> None:
    way = Way()
    first, second = way.along(5, 9)
    way.drop(second, 1)
    way.write(3)
    (third,) = way.trie.advance(second, keys(range(9, 12)))
    resume.capture(way.sequence, third)
    assert extents(third) == [(9, 12), (4, 12), (11, 12)]
    way.back(third)
    # Those above are filled again: what was taken stays.
    way.back(first)
    way.write(4)
    resume.capture(way.sequence, second)
    assert extents(second)[1] == (5, 9)
    before = third.slots[1]
    way.back(third)
    resume.capture(way.sequence, third)
    assert third.slots[1] is before


def test_a_window_that_lost_what_was_above_is_taken_anew() -> None:
    """The layers that stand there have it; what the node held of it is closed."""
    way = Way()
    _, second, third = way.along(5, 9, 12)
    way.drop(second, 1)
    count = way.sequence.ledger.count
    resume.capture(way.sequence, third)
    assert extents(third) == [(9, 12), (4, 12), (11, 12)]
    assert way.sequence.ledger.count == count
    way.back(third)


def test_a_window_that_was_taken_whole_is_cut_and_joined_with_its_node() -> None:
    """Above it has been filled since: the halves overlap with that."""
    way = Way()
    first, second, third = way.along(5, 9, 14)
    way.drop(second, 1)
    resume.capture(way.sequence, third)
    assert extents(third)[1] == (6, 14)
    way.back(first)
    way.write(4)
    resume.capture(way.sequence, second)
    upper = way.trie.split(third, 3)
    assert (extents(upper)[1], extents(third)[1]) == ((6, 12), (12, 14))
    assert way.trie.merge(second) is upper
    assert (extents(upper)[1], extents(third)[1]) == ((5, 12), (12, 14))
    assert extents(way.trie.merge(upper)) == [(5, 14), (6, 14), (13, 14)]
    way.back(third)


def test_live_slices_take_the_place_of_stored_ones() -> None:
    way = Way()
    (first,) = way.along(5)
    way.sequence.reset()
    size = way.sequence.ledger.nbytes
    way.write(5)
    slices, window, state = first.slots
    assert slices is not None
    freed = slices.nbytes
    resume.capture(way.sequence, first)
    assert first.slots[0] is not slices
    assert first.slots[1:] == [window, state]
    assert way.sequence.ledger.nbytes == size - freed
    with pytest.raises(RuntimeError, match="closed before"):
        slices.close()


def test_a_snapshot_moved_into_a_layer_is_held_there_alone() -> None:
    """The node holds it again, whole, when the layers go elsewhere."""
    way = Way()
    first, second, third = way.along(5, 9, 12)
    for piece in (way.sequence.states[1].page_out, way.sequence.states[2].page_out):
        complete(piece())
    slices = third.slots[0]
    others = first.nbytes + second.nbytes
    assert third.nbytes > 0
    resume.return_to_layers(way.sequence, third)
    assert third.slots[0] is slices
    assert extents(third) == [(9, 12), (4, 12), (11, 12)]
    assert [piece.live for piece in third.slots if piece] == [True] * 3
    assert (way.sequence.ledger.nbytes, way.sequence.ledger.count) == (others, 9)
    before = list(third.slots)
    resume.return_to_layers(way.sequence, third)
    assert third.slots == before
    for node in (first, second):
        way.drop(node, 1)
    way.back(third)


def test_a_restored_state_is_live_already_a_window_is_not() -> None:
    way = Way()
    (first,) = way.along(12)
    way.back(first)
    assert [piece.live for piece in first.slots if piece] == [True, False, True]
    resume.return_to_layers(way.sequence, first)
    assert way.sequence.ledger.nbytes == 0
