"""ArraysCache: the states of recurrent and convolution layers (Mamba, linear attention, short convolutions).

It has no offset, and a state can be neither split nor rewound, only put back, or computed again from what a round has
read (`scans.py`). Convolution states are often slices that keep the whole forward alive; a copy does not.
"""

from typing import Protocol, cast

import mlx.core as mx

from runner.cache.layer_interface import Mark
from runner.cache.layers.adapter import CountedState
from runner.cache.layers.scans import ROW_COPIES, RoundReads, States
from runner.cache.layers.snapshot import Owned, own

_FEW = 16  # tokens: what so short a forward leaves behind, a step or a round, is less than a copy of every state


class Recurrent(Protocol):
    """The attributes of ArraysCache that are read and set."""

    cache: States
    left_padding: mx.array | None
    lengths: mx.array | None


class RecurrentState(CountedState[States]):
    """A recurrent layer. `left_padding` and `lengths` belong to batches and are None here."""

    batchable = True
    markable = True  # models replace the arrays in its list, and write into none
    layer: Recurrent

    def advance(self, count: int) -> None:
        super().advance(count)
        if count > _FEW:
            # A convolution state is often a slice, which would keep all arrays of the forward alive.
            self.layer.cache = [None if x is None else own(x) for x in self.layer.cache]

    def mark(self, count: int) -> Mark:
        mark = super().mark(count)
        convolved = [x for x in self.layer.cache if x is not None and x.ndim == 3]
        read = sum(x.nbytes + ROW_COPIES * count * (x.nbytes // x.shape[1]) for x in convolved)
        return mark._replace(nbytes=mark.nbytes + read, reads=RoundReads(lambda: self.layer.cache, count))

    def can_revert(self, mark: Mark, to: int) -> bool:
        return super().can_revert(mark, to) or self._within(mark, to)

    def revert(self, mark: Mark, to: int) -> None:
        if mark.reads is None or not self._within(mark, to):
            super().revert(mark, to)
            return
        states = mark.reads.behind(to - mark.offset)
        super().revert(mark, mark.offset)
        self.layer.cache = states
        self._offset = to

    def _within(self, mark: Mark, to: int) -> bool:
        """Returns True if the states behind so many tokens, which end within the round, are known."""
        return mark.offset < to < self.offset and mark.reads is not None and mark.reads.known

    def arrays(self) -> list[mx.array]:
        return [x for x in (*self.layer.cache, self.layer.left_padding, self.layer.lengths) if x is not None]

    @property
    def content(self) -> States:
        return self.layer.cache

    def copy(self, start: int, stop: int) -> Owned[States]:  # noqa: ARG002  there is only the one state
        states = [None if x is None else own(x) for x in self.layer.cache]
        return Owned(states, [x for x in states if x is not None])

    def absorb(self, batch_cache: object, row: int, count: int) -> None:  # noqa: ARG002  the forward around it counts
        self._check_none_live()
        self.layer.cache = [None if x is None else own(x[row : row + 1]) for x in cast("Recurrent", batch_cache).cache]

    def _set(self, content: States) -> None:
        self.layer.cache = content
        self.layer.left_padding = self.layer.lengths = None
