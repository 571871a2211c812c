"""The deepest offset on a path of the trie that all layers can be restored to, and the way there.

The paths are made by hand, over fake layers that note the calls they get. Nodes are written as the offsets where they
end; the snapshots of a layer as the ends of the nodes that have one.
"""

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import cast

import mlx.core as mx
import pytest

from runner.cache import resume
from runner.cache.layer_interface import Miss, Snapshot
from runner.cache.layers.adapter import LayerState
from runner.cache.layers.snapshot import Copy, Ledger, Owned
from runner.cache.node import Node, keys
from runner.cache.sequence import SequenceLayers
from runner.cache.sketch import LayerFacts


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
                begin = max(node.start, state.needs(node.end)) if start is None else start
                node.slots[slot] = cast("Snapshot", SimpleNamespace(start=begin, stop=node.end, nbytes=1))
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


def test_tokens_are_covered_by_nodes_without_a_gap() -> None:
    scene = Scene(Slices).hold(0, 10, 20, 30)
    assert all(scene.covers(begin, end) for end in range(31) for begin in range(end))
    scene.path[2].slots = [None]
    assert {(begin, end) for end in range(31) for begin in range(end) if scene.covers(begin, end)} == {
        (begin, end) for end in range(31) for begin in range(end) if end <= 10 or begin >= 20
    }


MIXED = Scene(Slices, State, Window).hold(0, 10, 20, 30).hold(1, 10, 30).hold(2, 10, 20)
"""The window cannot stand at 30, and the state not at 20; at 10 all can."""
DEEPEST = [
    # slices follow each other without a gap
    (Scene(Slices), 30, 0, Miss.NON_TRIMMABLE),
    (Scene(Slices).hold(0, 10), 30, 10, Miss.NON_TRIMMABLE),
    (Scene(Slices).hold(0, 10, 30), 30, 10, Miss.NON_TRIMMABLE),
    (Scene(Slices).hold(0, 20, 30), 30, 0, Miss.NON_TRIMMABLE),
    (Scene(Slices).hold(0, 10, 20), 30, 20, Miss.NON_TRIMMABLE),
    # a state stands only where it was taken
    (Scene(State).hold(0, 10), 30, 10, Miss.NON_TRIMMABLE),
    (Scene(State).hold(0, 10, 30), 29, 10, Miss.NON_TRIMMABLE),
    (Scene(State).hold(0, 20, 30), 30, 30, Miss.NONE),
    (Scene(State), 30, 0, Miss.NON_TRIMMABLE),
    # within an edge a window stands where its tokens are
    (Scene(Window).hold(0, 10, 20, 30), 25, 25, Miss.NONE),
    (Scene(Window).hold(0, 30), 25, 0, Miss.WINDOW_PASSED),
    (Scene(Window, ends=(30,)).hold(0, 30), 25, 0, Miss.WINDOW_PASSED),
    (Scene(Window, ends=(12,)).hold(0, 12), 7, 7, Miss.NONE),
    # a window is made of the nodes that it reaches back to
    (Scene(Window).hold(0, 20, 30), 30, 30, Miss.NONE),
    (Scene(Window).hold(0, 10, 30), 30, 10, Miss.WINDOW_PASSED),
    (Scene(Window).hold(0, 20, 30), 25, 25, Miss.NONE),
    (Scene(Window).hold(0, 20, 30), 24, 0, Miss.WINDOW_PASSED),
    (Scene(Window).hold(0, 10).hold(0, 30, start=15), 30, 30, Miss.NONE),
    # the reason is why not the whole match
    (MIXED, 30, 10, Miss.WINDOW_PASSED),
    (MIXED, 20, 10, Miss.NON_TRIMMABLE),
]


@pytest.mark.parametrize(("scene", "matched", "at", "why"), DEEPEST)
def test_the_deepest_offset_at_which_all_layers_can_stand(scene: Scene, matched: int, at: int, why: Miss) -> None:
    assert scene.find(matched) == (at, why)


def test_a_node_without_any_slot_holds_nothing() -> None:
    scene = Scene(Slices, State).hold(0, 10, 20, 30)
    scene.path[3].slots = []
    assert scene.find(30) == (0, Miss.NON_TRIMMABLE)
    assert scene.hold(1, 20).find(30) == (20, Miss.NON_TRIMMABLE)


@pytest.mark.parametrize(("back", "reached"), [(0, 15), (15, 15), (16, 0)])
def test_a_layer_that_can_go_back_by_itself_needs_no_piece(back: int, reached: int) -> None:
    found, why = Scene(Window, offset=18, back=back).find(15, common=15)
    assert (found, why) == (reached, Miss.NONE if reached else Miss.WINDOW_PASSED)


WINDOW_ENDS = (10, 12, 20, 30)
WAYS = [
    # only what is missing moves in
    (Scene(Slices, offset=10).hold(0, 10, 20, 30), 30, 10, ["left", "in 20 30"]),
    (Scene(Slices, offset=10).hold(0, 10, 20, 30), 20, 10, ["left", "in 20"]),
    (Scene(Slices).hold(0, 10, 20, 30), 20, 0, ["left", "in 10 20"]),
    # slices go back to where the paths part
    (Scene(Slices, offset=40).hold(0, 10, 20, 30), 30, 10, ["back to 10", "left", "in 20 30"]),
    (Scene(Slices, offset=40), 20, 30, ["back to 20"]),
    # a window moves in from the nodes that it reaches back to
    (Scene(Window, offset=40, ends=WINDOW_ENDS).hold(0, *WINDOW_ENDS), 30, 0, ["left", "in 20 30"]),
    (Scene(Window, offset=40, ends=WINDOW_ENDS).hold(0, *WINDOW_ENDS), 20, 0, ["left", "in 10 12 20"]),
    (Scene(Window, offset=40).hold(0, 10).hold(0, 30, start=15), 30, 0, ["left", "in 30"]),
    # it goes back by itself if it can
    (Scene(Window, offset=12, back=0).hold(0, 10), 10, 10, ["left", "back to 10"]),
    (Scene(Window, offset=12, back=0).hold(0, 10), 10, 5, ["left", "in 10"]),
    # layers leave live snapshots before anything moves, slices before anything is overwritten
    (
        Scene(Slices, State, offset=40).hold(0, 10, 20).hold(1, 20),
        20,
        10,
        ["left", "back to 10", "left", "in 20", "in 20"],
    ),
]


@pytest.mark.parametrize(("scene", "at", "common", "notes"), WAYS)
def test_the_way_of_the_layers_to_an_offset(scene: Scene, at: int, common: int, notes: list[str]) -> None:
    assert scene.go(at, common) == notes


def test_deepest_offset_and_restore_to_agree_on_every_scene() -> None:
    """Wherever `find` says that layers can stand, `go` takes them."""
    for kind, held, stood, common in product((State, Window), range(8), range(8), (0, 10, 20)):
        slices, others = ([end for bit, end in enumerate((10, 20, 30)) if bits >> bit & 1] for bits in (held, stood))
        scene = Scene(Slices, kind, offset=40).hold(0, *slices).hold(1, *others)
        at, _ = scene.find(30, common)
        scene.go(at, common)
