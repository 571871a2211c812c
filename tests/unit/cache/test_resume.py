"""The deepest offset on a path of the trie that all layers can be restored to, and the way there.

The paths are made by hand, over fake layers that note the calls they get. Nodes are written as the offsets where they
end; the snapshots of a layer as the ends of the nodes that have one.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import mlx.core as mx
import pytest

from runner.cache import resume
from runner.cache.layer_interface import Miss, Snapshot
from runner.cache.layers.adapter import LayerState
from runner.cache.layers.snapshot import Copy, Ledger, Owned
from runner.cache.node import Node, keys
from runner.cache.sequence import SequenceLayers
from runner.cache.sketch import LayerFacts


class Held(Snapshot):
    """A snapshot of the tokens [start, stop) of a layer."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    @property
    def live(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return 1

    def split(self, at: int) -> tuple[Snapshot | None, Snapshot]:
        raise NotImplementedError

    def after(self, first: Snapshot | None) -> Snapshot | None:
        raise NotImplementedError

    def close(self) -> None: ...


class Noted(LayerState):
    """A layer that stands somewhere and notes what it is told. It can go back to `back`, by itself."""

    def __init__(self, notes: list[str], offset: int, back: int | None) -> None:
        super().__init__(SimpleNamespace(), Ledger())
        self.notes = notes
        self.at = offset
        self.back = offset if back is None else back

    @property
    def offset(self) -> int:
        return self.at

    @property
    def empty(self) -> bool:
        return False

    @staticmethod
    def needs(at: int) -> int:
        return at - 1

    def can_rewind(self, to: int) -> bool:
        return self.back <= to <= self.at

    def rewind(self, to: int) -> None:
        assert self.can_rewind(to)
        if to != self.at:
            self.notes.append(f"back to {to}")
        self.at = to

    def reset(self) -> None:
        self.notes.append("reset")
        self.at = 0

    def snapshot(self, start: int, stop: int) -> Snapshot | None:
        raise NotImplementedError

    def copy_tokens(self, start: int, stop: int) -> Owned:
        raise NotImplementedError

    def restore(self, snapshots: Sequence[Snapshot]) -> None:
        self.check(snapshots)
        if snapshots:
            self.notes.append(f"in {' '.join(str(piece.stop) for piece in snapshots)}")
            self.at = snapshots[-1].stop

    def check(self, snapshots: Sequence[Snapshot]) -> None:
        """They have all that is needed at the end of the last, and none is of no use."""
        at = snapshots[-1].stop
        needed = self.needs(at)
        held = [token for piece in snapshots for token in range(piece.start, piece.stop)]
        assert set(held) >= set(range(needed, at))
        assert all(piece.stop > needed for piece in snapshots)

    def page_out(self) -> list[Copy]:
        self.notes.append("left")
        return []

    def arrays(self) -> list[mx.array]:
        return []


class Slices(Noted):
    """Goes back anywhere."""

    sliceable = True

    def __init__(self, notes: list[str], offset: int, back: int | None) -> None:
        super().__init__(notes, offset, 0)

    @staticmethod
    def needs(at: int) -> int:
        return 0

    def check(self, snapshots: Sequence[Snapshot]) -> None:
        assert [piece.start for piece in snapshots] == [self.at, *(piece.stop for piece in snapshots)][: len(snapshots)]


class State(Noted):
    """Stands where it stands."""


class Window(Noted):
    """Looks back to the last 15 tokens. Goes back as long as nothing has left it."""

    refusal = Miss.WINDOW_PASSED

    @staticmethod
    def needs(at: int) -> int:
        return max(0, at - 15)


class Adapted:
    """A layer that has its adapter already."""

    def __init__(self, state: Noted) -> None:
        self.state = state

    @staticmethod
    def adapter(layer: "Adapted", _: Ledger) -> Noted:
        return layer.state


class Scene:
    """Layers that stand somewhere, and a path whose nodes end at some offsets."""

    def __init__(
        self, *kinds: type[Noted], offset: int = 0, ends: Sequence[int] = (10, 20, 30), back: int | None = None
    ) -> None:
        self.notes: list[str] = []
        made = [kind(self.notes, offset, back) for kind in kinds]
        self.sequence = SequenceLayers(LayerFacts(lambda: [*map(Adapted, made)], frozenset(range(len(kinds)))))
        self.path = [Node(keys(()), None)]
        for start, stop in zip((0, *ends), ends, strict=False):
            node = Node(keys(range(start, stop)), self.path[-1])
            node.slots = [None] * len(kinds)
            self.path.append(node)

    def hold(self, slot: int, *ends: int, start: int | None = None) -> "Scene":
        """The nodes that end there have what this layer holds of them, or from `start` on."""
        state = self.sequence.states[slot]
        for node in self.path:
            if node.end in ends:
                node.slots[slot] = Held(max(node.start, state.needs(node.end)) if start is None else start, node.end)
        return self

    def covers(self, begin: int, end: int, slot: int = 0) -> bool:
        return resume.covers(self.path, slot, begin, end)

    def find(self, matched: int, common: int = 0) -> tuple[int, Miss]:
        found = resume.deepest_offset(self.sequence, self.path, matched, common)
        assert self.notes == []
        return found

    def go(self, at: int, common: int = 0) -> list[str]:
        resume.restore_to(self.sequence, self.path, at, common)
        assert {state.offset for state in self.sequence.states} == {at}
        assert self.sequence.position == at
        return self.notes


# --- covers


def test_tokens_are_covered_by_nodes_without_a_gap() -> None:
    scene = Scene(Slices).hold(0, 10, 20, 30)
    assert all(scene.covers(begin, end) for end in range(31) for begin in range(end))
    scene.path[2].slots = [None]
    assert {(begin, end) for end in range(31) for begin in range(end) if scene.covers(begin, end)} == {
        (begin, end) for end in range(31) for begin in range(end) if end <= 10 or begin >= 20
    }


# --- find


@pytest.mark.parametrize(("held", "reached"), [((), 0), ((10,), 10), ((10, 30), 10), ((20, 30), 0), ((10, 20), 20)])
def test_slices_reach_as_far_as_they_follow_each_other(held: tuple[int, ...], reached: int) -> None:
    assert Scene(Slices).hold(0, *held).find(30) == (reached, Miss.NON_TRIMMABLE)


def test_a_state_is_where_it_stands_only() -> None:
    assert Scene(State).hold(0, 10).find(30) == (10, Miss.NON_TRIMMABLE)
    assert Scene(State).hold(0, 10, 30).find(29) == (10, Miss.NON_TRIMMABLE)
    assert Scene(State).hold(0, 20, 30).find(30) == (30, Miss.NONE)
    assert Scene(State).find(30) == (0, Miss.NON_TRIMMABLE)


def test_a_node_without_any_slot_holds_nothing() -> None:
    scene = Scene(Slices, State).hold(0, 10, 20, 30)
    scene.path[3].slots = []
    assert scene.find(30) == (0, Miss.NON_TRIMMABLE)
    assert scene.hold(1, 20).find(30) == (20, Miss.NON_TRIMMABLE)


def test_within_an_edge_a_window_stands_where_its_tokens_are() -> None:
    """The node holds tokens 20 to 30, those above the others."""
    assert Scene(Window).hold(0, 10, 20, 30).find(25) == (25, Miss.NONE)
    assert Scene(Window).hold(0, 30).find(25) == (0, Miss.WINDOW_PASSED)
    assert Scene(Window, ends=(30,)).hold(0, 30).find(25) == (0, Miss.WINDOW_PASSED)
    assert Scene(Window, ends=(12,)).hold(0, 12).find(7) == (7, Miss.NONE)


def test_a_window_is_made_of_the_nodes_that_it_reaches_back_to() -> None:
    assert Scene(Window).hold(0, 20, 30).find(30) == (30, Miss.NONE)
    assert Scene(Window).hold(0, 10, 30).find(30) == (10, Miss.WINDOW_PASSED)
    assert Scene(Window).hold(0, 20, 30).find(25) == (25, Miss.NONE)
    assert Scene(Window).hold(0, 20, 30).find(24) == (0, Miss.WINDOW_PASSED)
    assert Scene(Window).hold(0, 10).hold(0, 30, start=15).find(30) == (30, Miss.NONE)


@pytest.mark.parametrize(("back", "reached"), [(0, 15), (15, 15), (16, 0)])
def test_a_layer_that_can_go_back_by_itself_needs_no_piece(back: int, reached: int) -> None:
    found, why = Scene(Window, offset=18, back=back).find(15, common=15)
    assert (found, why) == (reached, Miss.NONE if reached else Miss.WINDOW_PASSED)


def test_the_reason_is_why_not_the_whole_match() -> None:
    """The window fails at 30, the state at 20; at 10 both stand."""
    scene = Scene(Slices, State, Window).hold(0, 10, 20, 30).hold(1, 10, 30).hold(2, 10, 20)
    assert scene.find(30) == (10, Miss.WINDOW_PASSED)
    assert scene.find(20) == (10, Miss.NON_TRIMMABLE)


# --- go


def test_only_what_is_missing_moves_in() -> None:
    assert Scene(Slices, offset=10).hold(0, 10, 20, 30).go(30, common=10) == ["in 20 30"]
    assert Scene(Slices, offset=10).hold(0, 10, 20, 30).go(20, common=10) == ["in 20"]
    assert Scene(Slices).hold(0, 10, 20, 30).go(20) == ["in 10 20"]


def test_slices_go_back_to_where_the_paths_part() -> None:
    assert Scene(Slices, offset=40).hold(0, 10, 20, 30).go(30, common=10) == ["back to 10", "in 20 30"]
    assert Scene(Slices, offset=40).go(20, common=30) == ["back to 20"]


def test_a_window_moves_in_from_the_nodes_that_it_reaches_back_to() -> None:
    ends = (10, 12, 20, 30)
    assert Scene(Window, offset=40, ends=ends).hold(0, *ends).go(30) == ["left", "in 20 30"]
    assert Scene(Window, offset=40, ends=ends).hold(0, *ends).go(20) == ["left", "in 10 12 20"]
    assert Scene(Window, offset=40).hold(0, 10).hold(0, 30, start=15).go(30) == ["left", "in 30"]


def test_a_window_goes_back_by_itself_if_it_can() -> None:
    assert Scene(Window, offset=12, back=0).hold(0, 10).go(10, common=10) == ["left", "back to 10"]
    assert Scene(Window, offset=12, back=0).hold(0, 10).go(10, common=5) == ["left", "in 10"]


def test_what_is_live_is_left_before_anything_moves() -> None:
    """Slices look after themselves."""
    scene = Scene(Slices, State, offset=40).hold(0, 10, 20).hold(1, 20)
    assert scene.go(20, common=10) == ["left", "back to 10", "in 20", "in 20"]


def test_deepest_offset_and_restore_to_agree_on_every_scene() -> None:
    """Wherever `find` says that layers can stand, `go` takes them."""
    for kind in (State, Window):
        for held in range(8):
            for stood in range(8):
                for common in (0, 10, 20):
                    ends = [10, 20, 30]
                    slices = [end for bit, end in enumerate(ends) if held >> bit & 1]
                    others = [end for bit, end in enumerate(ends) if stood >> bit & 1]
                    scene = Scene(Slices, kind, offset=40).hold(0, *slices).hold(1, *others)
                    at, _ = scene.find(30, common)
                    scene.go(at, common)
