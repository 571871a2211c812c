"""The parts of the target that drafters use, and a tap, which keeps the outputs of chosen modules of the target. The
target is the model whose answers are drafted."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from runner.model.weights.loading import LoadedModel
from runner.model.weights.parameters import observed

Map = Callable[[mx.array], mx.array]
Draw = Callable[[mx.array], mx.array]
"""Draws lazy tokens, uint32 [B], from logits [B, V]. The tokens count as drawn for later calls of the function."""


class Target(NamedTuple):
    """The parts of a text model that a drafter uses. They are the model's own objects, not copies."""

    args: object
    """The `ModelArgs` from which mlx-lm made the model; None if it keeps none."""
    embed: Map
    """Maps token ids [B, L] to embeddings [B, L, D], on the model's own scale."""
    unembed: Map
    """Maps hidden states after the final norm, [B, L, D], to logits [B, L, V], on the model's own scale. Tokens that
    must never be chosen get -inf."""
    norm: Module
    """The norm after the last layer."""
    layers: Sequence[Module]


def target_of(loaded: LoadedModel, scale: tuple[float, float] | None = None) -> Target:
    """Returns the parts of a loaded model. `scale` has a factor for logits and then a limit, 0 for none, which replace
    the model's own. Computes nothing, so the model may be made of placeholders."""
    text = cast("Module", getattr(loaded.module, "language_model", loaded.module))
    inner = text["model"] if "model" in text else text["backbone"]
    table = inner["embed_tokens"] if "embed_tokens" in inner else inner["embeddings"]
    factor, args = getattr(inner, "embed_scale", 1.0), getattr(text, "args", None)
    own = getattr(args, "output_multiplier", 1.0), getattr(args, "final_logit_softcapping", None) or 0.0
    return Target(
        args,
        table if factor == 1.0 else lambda tokens: table(tokens) * factor,
        _output(text.get("lm_head", table.as_linear), *(scale or own), loaded.suppressed),
        cast("Module", inner.get("norm", inner.get("norm_f"))),  # may be None: DFlash drafts need no norm
        inner["layers"],
    )


def _output(project: Map, factor: float, most: float, suppressed: Collection[int]) -> Map:
    """Returns the output layer with the scaling that some models apply to their logits. Drafts are drawn like the
    target's tokens: from logits on another scale they would hardly ever be right."""

    def unembed(states: mx.array) -> mx.array:
        logits = project(states)
        if factor != 1.0:
            logits = logits * factor
        if most:
            logits = mx.tanh(logits / most) * most
        return without(suppressed, logits)

    return unembed


def without(suppressed: Collection[int], logits: mx.array) -> mx.array:
    """Returns the logits [..., V] with -inf for the `suppressed` tokens, which must never be chosen."""
    return logits.at[..., mx.array([*suppressed])].minimum(-mx.inf) if suppressed else logits


class Tap:
    """Keeps the outputs of chosen modules during one forward, which it does not change. Owner: the engine thread."""

    def __init__(self, modules: Sequence[Module], most_rows: int) -> None:
        """Keeps at most the last `most_rows` rows of each output."""
        self._modules = [
            (module, type(module), observed(type(module), partial(self.keep, place)))
            for place, module in enumerate(modules)
        ]
        self._most_rows = most_rows
        self._kept: dict[int, mx.array] = {}

    def observe(self, forward: Callable[[], mx.array]) -> tuple[mx.array, mx.array | None]:
        """Runs a forward. Returns the result of `forward`, and the lazy outputs of the M modules side by side,
        [B, L, M D]; None instead of outputs unless each module has one. Other forwards are as fast as without a tap."""
        try:
            for module, _, tapped in self._modules:
                module.__class__ = tapped
            result, kept = forward(), self._kept
        finally:
            self._kept = {}
            for module, plain, _ in self._modules:
                module.__class__ = plain
        if len(kept) < len(self._modules) or len({part.shape[:2] for part in kept.values()}) != 1:
            return result, None
        outputs = [kept[place] for place in range(len(kept))]
        return result, mx.concatenate(outputs, axis=-1) if len(outputs) > 1 else outputs[0]

    def keep(self, place: int, states: mx.array) -> None:
        """Keeps `states`, the output of the module at this place of the list."""
        if states.ndim == 3:
            self._kept[place] = states[:, -self._most_rows :]
