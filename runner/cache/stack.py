"""All layers of one model, moved together."""

import mlx.core as mx

from runner.cache.interface import LayerState, Miss
from runner.cache.layers import adapt, distrust, flatten
from runner.logs import Log

log = Log(__name__)


class LayerStack:
    """The cache list of a model and the adapters of its leaves.

    Between forwards all layers stand at one offset. A layer that stays empty while others fill is one that the model
    does not use; it has no say.
    """

    def __init__(self, layers: list[object]) -> None:
        """`layers` is a fresh cache list."""
        self.layers = layers
        self._states = [adapt(leaf) for leaf in flatten(layers)]
        self._position = 0

    @property
    def states(self) -> list[LayerState]:
        """The adapters of the layers in use."""
        return [state for state in self._states if not state.empty]

    @property
    def offset(self) -> int:
        """How many tokens every layer has surely seen: the least of all offsets."""
        return min((state.offset for state in self.states), default=0)

    def advance(self, count: int) -> None:
        """A forward over `count` tokens was built, without an error."""
        self._position += count
        for index, state in enumerate(self._states):
            state.advance(count)
            if state.offset != self._position and not state.empty:
                # Its clock counts something else (groups of tokens, say): rewinding by it would be wrong.
                log.info(
                    "a layer has a clock of its own: kept whole", layer=index, at=state.offset, tokens=self._position
                )
                self._states[index] = distrust(state, self._position)

    def level(self, to: int) -> Miss:
        """Takes every layer back to `to`; if one cannot, resets them all and says why."""
        for state in self.states:
            if not state.rewind(to):
                self.reset()
                return state.refusal
        self._position = to
        return Miss.NONE

    def reset(self) -> None:
        """Every layer empty, in the same objects."""
        for state in self._states:
            state.reset()
        self._position = 0

    def arrays(self) -> list[mx.array]:
        return [array for state in self._states for array in state.arrays()]

    def settle(self) -> None:
        """Computes what the layers hold. Raises what MLX raises."""
        mx.eval(self.arrays())

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self._states)
