"""The adapter for every other class: all its attributes as one state.

It trusts nothing that such a class says about itself, and never calls its methods.
"""

import copy
from collections.abc import Iterator

import mlx.core as mx

from runner.cache.layers.adapter import CountedState
from runner.cache.layers.snapshot import Ledger, Owned, own

Attributes = dict[str, object]


class GenericState(CountedState[Attributes]):
    """The attributes of an object, with all arrays in them."""

    @classmethod
    def taking_over(cls, layer: object, ledger: Ledger, fresh: Attributes, offset: int) -> "GenericState":
        """Returns an adapter for an object in use; `fresh` are its attributes when it was made, `offset` the tokens it
        has seen."""
        state = cls(layer, ledger)
        state.fresh = fresh
        state._offset = offset
        return state

    def arrays(self) -> list[mx.array]:
        return list(gather(vars(self.layer), set()))

    @property
    def content(self) -> Attributes:
        return vars(self.layer)

    def copy(self, start: int, stop: int) -> Owned[Attributes]:  # noqa: ARG002  there is only the one state
        """Returns a deep copy whose arrays own their bytes: `copy.deepcopy` alone shares the buffers."""
        attributes = vars(self.layer)
        owned = {id(array): own(array) for array in gather(attributes, set())}
        arrays = list(owned.values())
        return Owned(copy.deepcopy(attributes, {**owned}), arrays)

    def _set(self, content: Attributes) -> None:
        self._transplant(content)


def gather(value: object, seen: set[int]) -> Iterator[mx.array]:
    """Yields every array within containers and objects, once."""
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
