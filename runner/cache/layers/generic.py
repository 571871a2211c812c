"""Any other class: everything it holds, as one state.

Nothing is believed of what such a class says about itself; its methods are never called.
"""

import copy
from collections.abc import Iterator

import mlx.core as mx

from runner.cache.layers.leaf import CountedState
from runner.cache.layers.snapshot import own

Attributes = dict[str, object]


class GenericState(CountedState[Attributes]):
    """The attributes of an object, with all arrays in them."""

    @classmethod
    def taking_over(cls, leaf: object, fresh: Attributes, offset: int) -> "GenericState":
        """For an object in use: how it was when fresh, and how many tokens it has seen."""
        state = cls(leaf)
        state.fresh = fresh
        state._offset = offset
        return state

    def arrays(self) -> list[mx.array]:
        return list(_gather(vars(self.leaf), set()))

    def _copy(self) -> tuple[Attributes, list[mx.array]]:
        return _copied(vars(self.leaf))

    def _put(self, content: Attributes) -> None:
        self._transplant(_copied(content)[0])


def _copied(attributes: Attributes) -> tuple[Attributes, list[mx.array]]:
    """A deep copy whose arrays own their bytes (`copy.deepcopy` alone shares the buffers), and these arrays."""
    owned = {id(array): own(array) for array in _gather(attributes, set())}
    arrays = list(owned.values())
    return copy.deepcopy(attributes, {**owned}), arrays


def _gather(value: object, seen: set[int]) -> Iterator[mx.array]:
    """Every array within containers and objects, once."""
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
        yield from _gather(item, seen)
