"""What a head shares with its target: the table of embeddings, the output layer, and hidden states."""

from collections.abc import Callable
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

Map = Callable[[mx.array], mx.array]


class Target(NamedTuple):
    """The parts of a text model that a head uses. They stay the model's own: nothing is copied."""

    args: object
    """The arguments that its class was made from."""
    embed: Map
    """Token ids [B, L] to rows [B, L, D]."""
    unembed: Map
    """Hidden states behind the final norm, [B, L, D], to logits [B, L, V]."""
    norm: Module
    """The final norm."""


def target_of(module: Module) -> Target:
    """Returns the parts of one of mlx-lm's models."""
    text = cast("Module", getattr(module, "language_model", module))
    inner = text["model"] if "model" in text else text["backbone"]
    table = inner["embed_tokens"] if "embed_tokens" in inner else inner["embeddings"]
    return Target(
        text.args,
        cast("Map", table),
        cast("Map", text.get("lm_head", table.as_linear)),
        cast("Module", inner["norm"] if "norm" in inner else inner["norm_f"]),
    )


class Tap:
    """Keeps the hidden states behind the final norm of the last forward, while it is on. A model has one at most.

    The norm computes what it always does. Owner: the engine thread.
    """

    def __init__(self, norm: Module) -> None:
        """`norm` is the final norm of a model."""
        self.hidden: mx.array | None = None
        """Of the last forward since it was turned on, [B, L, D] (lazy)."""
        self._norm = norm
        self._plain = plain = type(norm)
        tap = self

        class TappedNorm(plain):  # type: ignore[misc, valid-type]  # the class of the norm, whichever it is
            def __call__(self, x: mx.array) -> mx.array:
                tap.hidden = hidden = plain.__call__(self, x)
                return cast("mx.array", hidden)

        self._tapped = TappedNorm

    @property
    def on(self) -> bool:
        """True if hidden states are kept."""
        return type(self._norm) is self._tapped

    def turn(self, on: bool) -> None:
        """Turns it on or off; forwards cost nothing more while it is off."""
        self._norm.__class__ = self._tapped if on else self._plain
        self.hidden = None

    def take(self) -> mx.array | None:
        """Returns the hidden states of the last forward, and forgets them."""
        hidden, self.hidden = self.hidden, None
        return hidden
