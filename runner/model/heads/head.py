"""A head with all that it needs to draft."""

from abc import abstractmethod
from collections.abc import Collection
from typing import NamedTuple, Self

import mlx.core as mx
from mlx.nn.layers.base import Module

import runner.process.lean_mlx_lm  # noqa: F401  # registers mlx_lm without its __init__

# isort: split
from mlx_lm.models.cache import KVCache

from runner.model.heads.target import Target
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
    suppressed: tuple[int, ...] = ()
    """Tokens that must never be chosen."""

    def make_layers(self) -> list[KVCache]:
        """Returns fresh layer caches for one text."""
        return [KVCache() for _ in range(self.module.attentions)]

    def states(self, hidden: mx.array, tokens: mx.array, layers: list[KVCache]) -> mx.array:
        """Returns the head's hidden states [1, L, D] for the target's or its own, `hidden` [1, L, D], and the tokens
        [1, L] behind them. Advances `layers`. Lazy."""
        return self.module(self.target.embed(tokens), hidden, layers)

    def logits(self, states: mx.array) -> mx.array:
        """Returns logits [1, L, V] of the tokens behind those that gave these states. Lazy."""
        scores = self.target.unembed(states)
        return scores.at[..., mx.array(self.suppressed)].minimum(-mx.inf) if self.suppressed else scores

    @property
    def nbytes(self) -> int:
        """The bytes of its own weights."""
        return sum(array.nbytes for array in parameters_of(self.module).values())
