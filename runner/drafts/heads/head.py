"""A head with all that it needs to draft, and the drafts that it makes."""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple, Self, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache

from runner.cache.session import Session
from runner.drafts.target import GROWTH_TOKENS, Draw, HiddenStateDrafter, Target
from runner.model.weights.experts import Weights
from runner.model.weights.parameters import parameters_of


class HeadModule(Module):
    """The weights of a head that are not its target's."""

    def __init__(self) -> None:
        Module.__init__(self)  # MLX's is not typed

    @classmethod
    @abstractmethod
    def of_target(cls, args: object, names: Collection[str]) -> Self:
        """Returns a head for a target made from `args`, with random lazy parameters, whose tensors have these names.
        Raises ModelError if there is no such head."""

    @abstractmethod
    def __call__(self, embedded: mx.array, hidden: mx.array, layers: list[KVCache]) -> mx.array:
        """Maps the rows of the next tokens and the hidden states before them, [1, L, D] each, to the hidden states of
        the head, [1, L, D], and advances `layers`."""

    @property
    @abstractmethod
    def attentions(self) -> int:
        """The number of layers that have a cache."""

    @classmethod
    @abstractmethod
    def renamed(cls, names: Collection[str]) -> dict[str, str]:
        """Maps the names of tensors, without all up to `mtp.`, to those that `sanitize` knows."""

    @classmethod
    def sanitize(cls, weights: Weights, *, shifted: Collection[str]) -> Weights:  # noqa: ARG003
        """Returns the weights under the names of the parameters. Those in `shifted` are norms that lack 1."""
        return weights


class Head(NamedTuple):
    """A head and its target's parts. Owner: the engine thread."""

    module: HeadModule
    target: Target

    def make_layers(self) -> list[KVCache]:
        """Returns fresh layer caches for one text."""
        return [KVCache() for _ in range(self.module.attentions)]

    def states(self, hidden: mx.array, tokens: mx.array, layers: list[KVCache]) -> mx.array:
        """Returns the head's hidden states [1, L, D] for the target's or its own, `hidden` [1, L, D], and the tokens
        [1, L] after them. Advances `layers`. Lazy."""
        return self.module(self.target.embed(tokens), hidden, layers)

    @property
    def nbytes(self) -> int:
        """The bytes of its own weights."""
        return sum(array.nbytes for array in parameters_of(self.module).values())


_MOST_ROWS = 256
_MOST_SLOTS = 4096
"""With more than these the layers of the head begin again, so they stay small, however long the text."""


class HeadDrafter(HiddenStateDrafter):
    """Drafts with the model's own head, one answer after the other.

    Slot i of the head's layers stands for token i, of which the target has computed the hidden state, and the token
    after it; the logits of the slot are those of the token after that. Only tokens that are certain stay in the
    layers. The text need not be followed from its beginning: drafts get worse, answers never.

    Owner: the engine thread.
    """

    def __init__(self, head: Head, most_rows: int = _MOST_ROWS, most_slots: int = _MOST_SLOTS) -> None:
        """Computes something with the head, and raises what that raises."""
        super().__init__("the model's own head", [head.target.norm], most_rows)
        self.head = head
        self._most_slots = most_slots
        # Of the text that is followed.
        self._layers: list[KVCache] = []
        self._at = 0  # the slot that comes next
        self._slots = 0  # in the layers
        self._last: mx.array | None = None  # the states of the slot before `_at`, [1, 1, D]
        layers, tokens = head.make_layers(), mx.zeros((1, 1), mx.uint32)
        states = head.states(head.target.embed(tokens), tokens, layers)
        mx.eval(head.target.unembed(states))  # MLX refuses some layers only when they compute
        kept = sum(cast("int", layer.nbytes) for layer in layers) * (most_slots // GROWTH_TOKENS)
        self.most_bytes = kept + 2 * most_rows * states.nbytes

    @property
    def nbytes(self) -> int:
        return sum(cast("int", layer.nbytes) for layer in self._layers) + super().nbytes

    def draft(self, session: Session, most: int, draw: Draw) -> list[int]:
        states = self._read(session.position, session.recorded)
        if states is None:
            return []
        drafts = [draw(self.head.target.unembed(states)[:, -1])]
        for _ in range(most - 1):
            mx.async_eval(drafts[-1])
            states = self.head.states(states, drafts[-1][:, None], self._layers)
            drafts.append(draw(self.head.target.unembed(states)[:, -1]))
        for layer in self._layers:
            layer.trim(most - 1)
        return cast("list[int]", mx.concatenate(drafts).tolist())

    def go_back(self, to: int) -> None:
        super().go_back(to)
        if to < self._at:
            self._begin(0)

    def free(self) -> None:
        super().free()
        self._begin(0)

    def _begin(self, at: int) -> None:
        self._layers = []
        self._at = at
        self._slots = 0
        self._last = None

    def _read(self, position: int, recorded: Sequence[int]) -> mx.array | None:
        """Reads what the target has seen, up to `position`. Returns the states of the last slot, [1, 1, D]; None if
        they are not known."""
        if position == self._at:
            return self._last
        first = self.first_waiting(position)
        if first is None:
            return None
        start = max(self._at, first)
        pictures = [place for place in range(start, position) if recorded[place + 1] < 0]
        if pictures:
            start = pictures[-1] + 1
        if start != self._at or not self._layers or self._slots + position - start > self._most_slots:
            self._begin(start)
            self._layers = self.head.make_layers()
        hidden = self.waiting(start, position)
        self.skip(position)
        states = self.head.states(hidden, mx.array([recorded[start + 1 : position + 1]]), self._layers)
        self._slots += position - start
        self._at = position
        self._last = states[:, -1:]
        return self._last
