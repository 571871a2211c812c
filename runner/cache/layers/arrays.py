"""ArraysCache: the states of recurrent and convolution layers (Mamba, linear attention, short convolutions).

It has no clock, and a state can neither be cut nor taken back. Convolution states are often slices that keep the
whole forward alive; a snapshot copies them.
"""

from typing import Protocol

import mlx.core as mx

from runner.cache.layers.leaf import CountedState
from runner.cache.layers.snapshot import own

States = list[mx.array | None]


class Recurrent(Protocol):
    """What of ArraysCache is read and set."""

    cache: States
    left_padding: mx.array | None
    lengths: mx.array | None


class ArraysState(CountedState[States]):
    """The recurrent layer. `left_padding` and `lengths` belong to batches and are None here."""

    leaf: Recurrent

    def arrays(self) -> list[mx.array]:
        return [x for x in (*self.leaf.cache, self.leaf.left_padding, self.leaf.lengths) if x is not None]

    def _copy(self) -> tuple[States, list[mx.array]]:
        states = _owned(self.leaf.cache)
        return states, [x for x in states if x is not None]

    def _put(self, content: States) -> None:
        self.leaf.cache = _owned(content)
        self.leaf.left_padding = self.leaf.lengths = None


def _owned(states: States) -> States:
    return [None if x is None else own(x) for x in states]
