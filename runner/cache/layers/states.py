"""Layers with a state, which is valid at one offset: ArraysCache, and every class without an adapter of its own."""

import copy
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import mlx.core as mx

from runner.cache.layer_interface import Snapshot
from runner.cache.layers.adapter import LayerState, Mark
from runner.cache.layers.scans import StateReads, States
from runner.cache.layers.snapshot import Copy, Ledger, Owned, StateSnapshot, own


class CountedState(LayerState):
    """A layer with a state, which has no offset of its own and cannot rewind: the adapter counts the tokens."""

    whole = True
    kind = StateSnapshot
    offset = 0

    @staticmethod
    def needs(at: int) -> int:
        return at - 1

    @abstractmethod
    def content(self, at: int) -> object:
        """Returns the state at an offset that the layer `holds`, not copied."""

    def count_tokens(self, count: int) -> None:
        self.offset += count

    def can_rewind(self, to: int) -> bool:
        return to == self.offset

    def revert(self, mark: Mark, to: int) -> None:
        self._check_none_live()
        super().revert(mark, to)
        self.offset = to

    def reset(self) -> None:
        super().reset()
        self.offset = 0

    def restore(self, snapshots: Sequence[Snapshot]) -> None:
        snapshot = snapshots[-1]
        if not isinstance(snapshot, StateSnapshot):
            raise TypeError(f"{type(self).__name__} made no {type(snapshot).__name__}")
        self._check_none_live()
        if snapshot.owner is not None:  # the snapshot is live in another layer, and stays there
            self._set(snapshot.owner.copy_tokens(snapshot.start, snapshot.stop).content)
        else:
            self._set(snapshot.owned.content)
            snapshot.page_in(self)
        self.offset = snapshot.stop

    def _rewinds_after(self, count: int) -> bool:  # noqa: ARG002
        return False

    @abstractmethod
    def _set(self, content: object) -> None:
        """Makes `content` the state of the layer. Other objects must not hold `content`."""


_FEW = 16  # tokens: the arrays of so short a forward take less memory than copies of all states


class Recurrent(Protocol):
    """The attributes of ArraysCache that the adapter reads and sets."""

    cache: States
    left_padding: mx.array | None
    lengths: mx.array | None


class RecurrentState(CountedState):
    """ArraysCache: the states of a recurrent or convolution layer (Mamba, linear attention, short convolutions). Such a
    state can be neither split nor rewound. It can only be restored, or computed again from the reads of a round
    (`scans.py`). `left_padding` and `lengths` are for batches, and None here."""

    batchable = True
    markable = True  # models replace the arrays in the list `cache`, and write into no array
    layer: Recurrent

    def __init__(self, layer: object, ledger: Ledger) -> None:
        super().__init__(layer, ledger)
        self.passed: dict[int, States] = {}
        """The states at offsets in the last forward, until they are paged out. They own their bytes, and models write
        into no state."""
        self._reads: StateReads | None = None

    def holds(self, at: int) -> bool:
        return super().holds(at) or at in self.passed

    def watch(self, count: int, stops: Sequence[int]) -> StateReads | None:
        self._reads = StateReads(lambda: self.layer.cache, count, stops)
        return self._reads

    def count_tokens(self, count: int) -> None:
        reads, self._reads, self.passed = self._reads, None, {}
        if reads is not None and reads.known:
            self.passed = {self.offset + stop: reads.states_after([stop]) for stop in reads.stops}
        super().count_tokens(count)
        if count > _FEW:
            # A convolution state is often a slice, which keeps all arrays of the forward alive.
            self.layer.cache = _owned(self.layer.cache)

    def mark(self, count: int) -> Mark:
        return super().mark(count)._replace(reads=StateReads(lambda: self.layer.cache, count))

    def can_revert(self, mark: Mark, to: int) -> bool:
        return super().can_revert(mark, to) or self._within(mark, to)

    def reset(self) -> None:
        super().reset()
        self.passed, self._reads = {}, None

    def revert(self, mark: Mark, to: int) -> None:
        if mark.reads is None or not self._within(mark, to):
            super().revert(mark, to)
            return
        states = mark.reads.states_after([to - mark.offset])
        super().revert(mark, mark.offset)
        self.layer.cache = states
        self.offset = to

    def _within(self, mark: Mark, to: int) -> bool:
        """Returns True if `to` is within the round, and the states at `to` can be computed."""
        return mark.offset < to < self.offset and mark.reads is not None and mark.reads.known

    def arrays(self) -> list[mx.array]:
        return [x for x in (*self.layer.cache, self.layer.left_padding, self.layer.lengths) if x is not None]

    def passed_arrays(self) -> list[mx.array]:
        return [x for states in self.passed.values() for x in states if x is not None]

    def content(self, at: int) -> States:
        return self.layer.cache if at == self.offset else self.passed[at]

    def copy_tokens(self, start: int, stop: int) -> Owned:  # noqa: ARG002  there is only the one state
        states = _owned(self.layer.cache) if stop == self.offset else [*self.passed[stop]]
        return Owned(states, [x for x in states if x is not None])

    def page_out(self) -> list[Copy]:
        copies, self.passed = super().page_out(), {}
        return copies

    def absorb(self, batch_cache: object, row: int, count: int) -> None:  # noqa: ARG002  the forward around it counts
        self._check_none_live()
        self.layer.cache = [None if x is None else own(x[row : row + 1]) for x in cast("Recurrent", batch_cache).cache]

    def _set(self, content: object) -> None:
        self.layer.cache, self.passed = cast("States", content), {}
        self.layer.left_padding = self.layer.lengths = None


def _owned(states: States) -> States:
    return [None if x is None else own(x) for x in states]


Attributes = dict[str, object]


class GenericState(CountedState):
    """A layer of any other class: all its attributes are one state. The adapter never calls the methods of such a
    class."""

    def arrays(self) -> list[mx.array]:
        return list(gather(vars(self.layer), set()))

    def content(self, at: int) -> Attributes:  # noqa: ARG002  there is only the one state
        return vars(self.layer)

    def copy_tokens(self, start: int, stop: int) -> Owned:  # noqa: ARG002  there is only the one state
        """Returns a deep copy whose arrays own their bytes: arrays from `copy.deepcopy` alone share the buffers."""
        attributes = vars(self.layer)
        owned = {id(array): own(array) for array in gather(attributes, set())}
        arrays = list(owned.values())
        return Owned(copy.deepcopy(attributes, {**owned}), arrays)

    def _set(self, content: object) -> None:
        self._transplant(cast("Attributes", content))


def gather(value: object, seen: set[int]) -> Iterator[mx.array]:
    """Yields every array inside `value`, its containers and its objects, once. Skips the ids in `seen`."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, mx.array):
        yield value
        return
    inner: Iterator[object] = iter(())
    if isinstance(value, dict):
        inner = iter(value.values())
    elif isinstance(value, list | tuple | set):
        inner = iter(value)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        inner = iter(vars(value).values())
    for item in inner:
        yield from gather(item, seen)
