"""Logits in float32, for scores of the models for which Ollama's runner computes them so."""

from collections.abc import Callable, Sequence

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

Forward = Callable[[mx.array, list[object]], mx.array]
_HEADS: dict[type[Module], str] = {Linear: "__call__", Embedding: "as_linear"}
"""Heads that are not quantized, and the method that maps hidden states to logits."""


def in_float32(module: Module, forward: Forward, tokens: Sequence[int]) -> Forward:
    """Returns `forward`, of this module, with the last logits of these tokens computed in float32 if this is a
    Qwen 3.5 whose head is not quantized, and as it is for any other module."""
    text = getattr(module, "language_model", None)
    if not isinstance(text, Module) or not type(text).__module__.endswith(".qwen3_5"):
        return forward
    head = text.get("lm_head", text["model"]["embed_tokens"])
    plain, wanted = type(head), mx.array([*tokens])
    if plain not in _HEADS:
        return forward
    logits_of = getattr(plain, _HEADS[plain])

    def precise(head: Module, hidden: mx.array) -> mx.array:
        logits: mx.array = logits_of(head, hidden).astype(mx.float32)
        logits[:, -1, wanted] = hidden[:, -1].astype(mx.float32) @ head["weight"][wanted].T
        return logits

    changed = type(plain.__name__, (plain,), {_HEADS[plain]: precise})

    def scored(tokens: mx.array, layers: list[object]) -> mx.array:
        head.__class__ = changed
        try:
            return forward(tokens, layers)
        finally:
            head.__class__ = plain

    return scored
