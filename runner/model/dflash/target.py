"""What a DFlash draft shares with its target, and the hidden states behind chosen layers of the target."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from runner.errors import ModelError
from runner.model.dflash.config import DFlashConfig
from runner.model.heads.target import Map


class BlockTarget(NamedTuple):
    """The parts of a text model that a draft uses. They stay the model's own."""

    embed: Map
    """Token ids [B, L] to rows [B, L, D]."""
    unembed: Map
    """Hidden states behind the draft's last norm, [B, L, D], to logits [B, L, V] as the target would scale them."""
    tapped: tuple[Module, ...]
    """The layers whose outputs are the draft's context."""


def block_target(config: DFlashConfig, module: Module) -> BlockTarget:
    """Returns the parts of one of mlx-lm's models, which may be made of placeholders: nothing is computed. Raises
    ModelError if the draft was made for another one, or the model has no such parts."""
    try:
        text = cast("Module", getattr(module, "language_model", module))
        inner = cast("Module", text["model"] if "model" in text else text["backbone"])
        table = cast("Module", inner["embed_tokens"] if "embed_tokens" in inner else inner["embeddings"])
        layers = cast("Sequence[Module]", inner["layers"])
        embed = _embedding(table, getattr(inner, "embed_scale", 1.0))
        unembed = _output(text.get("lm_head", table.as_linear), text)
        rows = embed(mx.zeros((1, 1), mx.uint32))
        width, vocab_size = rows.shape[-1], unembed(rows).shape[-1]
    except Exception as error:  # whatever a model of another build says
        raise ModelError(f"the model has no parts that it could share ({type(error).__name__}: {error})") from error
    for what, wanted, found in (
        ("layers", config.target_layers, len(layers)),
        ("numbers a token", config.width, width),
        ("tokens in the vocabulary", config.vocab_size, vocab_size),
    ):
        if wanted and wanted != found:
            raise ModelError(f"it was made for a model of {wanted} {what}, and this one has {found}")
    if config.taps[-1] >= len(layers):
        raise ModelError(f"it draws on layer {config.taps[-1]}, and the model has {len(layers)} layers")
    if config.mask_token >= vocab_size:
        raise ModelError(f"its mask token is {config.mask_token}, and the model has {vocab_size} tokens")
    return BlockTarget(embed, unembed, tuple(layers[tap] for tap in config.taps))


def _embedding(table: Map, scale: float) -> Map:
    return table if scale == 1.0 else lambda tokens: table(tokens) * scale


def _output(project: Map, text: Module) -> Map:
    """Returns the output layer with the scale that some models give their logits. Drafts are drawn as the target draws:
    on another scale they would hardly ever be the same."""
    args = getattr(text, "args", None)
    factor, most = getattr(args, "output_multiplier", 1.0), getattr(args, "final_logit_softcapping", None)
    if factor == 1.0 and not most:
        return project

    def scaled(states: mx.array) -> mx.array:
        logits = project(states) * factor
        return mx.tanh(logits / most) * most if most else logits

    return scaled


class LayerTap:
    """Keeps the outputs of chosen layers of the last forward, while it is on. The layers compute what they always do.

    Owner: the engine thread.
    """

    def __init__(self, layers: Sequence[Module], most_rows: int) -> None:
        """Keeps no more than the last `most_rows` of each."""
        self._layers = [(layer, type(layer), _tapped(self, layer, place)) for place, layer in enumerate(layers)]
        self._kept: dict[int, mx.array] = {}
        self.most_rows = most_rows

    @property
    def on(self) -> bool:
        """True if outputs are kept."""
        return any(type(layer) is tapped for layer, _, tapped in self._layers)

    def turn(self, on: bool) -> None:
        """Turns it on or off; forwards cost nothing more while it is off."""
        self._kept = {}
        for layer, plain, tapped in self._layers:
            layer.__class__ = tapped if on else plain

    def keep(self, place: int, output: object) -> None:
        """Keeps the output of the layer at this place of the list: an array, or the first of several."""
        states = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(states, mx.array) and states.ndim == 3:
            self._kept[place] = states[:, -self.most_rows :]

    def take(self) -> mx.array | None:
        """Returns the outputs of the last forward side by side, [B, L, T D] (lazy), and forgets them; None unless all
        layers have given one."""
        kept, self._kept = self._kept, {}
        if len(kept) < len(self._layers) or len({part.shape[:2] for part in kept.values()}) != 1:
            return None
        return mx.concatenate([kept[place] for place in range(len(kept))], axis=-1)


def _tapped(tap: LayerTap, layer: Module, place: int) -> type[Module]:
    """Returns the class of the layer with a tap behind it."""
    plain = type(layer)

    class Tapped(plain):  # type: ignore[misc, valid-type]  # the class of the layer, whichever it is
        def __call__(self, *args: object, **kwargs: object) -> object:
            output = plain.__call__(self, *args, **kwargs)
            tap.keep(place, output)
            return output

    return Tapped
