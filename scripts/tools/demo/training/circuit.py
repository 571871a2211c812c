"""The demo model's initial weights: random, with an induction circuit laid into the first two layers.

From ordinary random weights a model of this size does not find out within minutes that an answer can be looked up in
its prompt. So training starts where the look-up already exists, roughly:

* The hidden vector is split into slots. Slot 0 of the embedding holds a random vector that identifies the token.
* Layer 0: head h attends exactly h + 1 tokens back, whatever the tokens are, and copies what stands there into slot
  h + 1. The query and key *biases* do it: rotated by RoPE they are in phase at one distance only.
* Layer 1: match heads compare slots of the query with slots of the keys one token further back, so that "Nora lives in"
  finds the place where "Nora lives in" stood before, and copy the token that stands there into slot 0. They use only
  the slow RoPE pairs, which hardly turn over the whole context.

Training then changes every weight.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama

_SLOT = 3 / 16  # of the hidden vector: five slots, and some dimensions to spare
_IDENTITY_SCALE = 0.5
_OTHER_SCALE = 0.02  # of the random weights around the circuit
_POSITION_GAIN = 11.0  # attention logits that a RoPE pair adds where it is in phase
_MATCH_GAIN = 6.0
_MATCH_DISTANCE = 4096  # tokens over which the RoPE pairs of a match head turn less than half a radian
_COPY_GAIN = 2.0

# What each match head compares: (slot of the query, slot of the key, dimensions as a share of the head's width).
_NAME_AND_RELATION = ((2, 3, 20 / 64), (0, 1, 8 / 64))
_MATCH_HEADS = (_NAME_AND_RELATION, _NAME_AND_RELATION, _NAME_AND_RELATION, ((0, 1, 28 / 64),))


def initialize(model: llama.Model, words: Sequence[str], seed: int) -> None:
    """Set every weight of `model`, whose token i reads `words[i]`, from `seed` alone."""
    rng = np.random.default_rng(seed)
    for layer in model.layers:
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            linear.weight = mx.array(_scatter(rng, linear.weight.shape))
    model.model.embed_tokens.weight = mx.array(_identities(rng, words, model.args.hidden_size))
    _look_back(model.layers[0].self_attn, model.args, rng)
    _look_up(model.layers[1].self_attn, model.args, rng)
    for layer in model.layers[2:]:
        attention = layer.self_attn
        shape = attention.q_proj.weight.shape
        _set(attention, *(_scatter(rng, shape) for _ in range(4)))


def _identities(rng: np.random.Generator, words: Sequence[str], hidden: int) -> np.ndarray:
    """Embeddings `[tokens, hidden]`: a random vector in slot 0, alike for a word with and without a leading space."""
    slot = _slot_width(hidden)
    table = _scatter(rng, (len(words), hidden))
    vectors: dict[str, np.ndarray] = {}
    for token, word in enumerate(words):
        table[token, :slot] = vectors.setdefault(word.strip() or word, rng.normal(0, _IDENTITY_SCALE, slot))
    return table


def _look_back(attention: llama.Attention, args: llama.ModelArgs, rng: np.random.Generator) -> None:
    """Head h attends h + 1 tokens back and copies slot 0 from there to slot h + 1, at the size it has in slot 0."""
    width, slot = attention.head_dim, _slot_width(args.hidden_size)
    shape = (args.num_attention_heads * width, args.hidden_size)
    query, key, value, output = (_scatter(rng, shape) for _ in range(4))
    query_bias, key_bias = np.zeros(shape[0], np.float32), np.zeros(shape[0], np.float32)
    frequencies = _rope_frequencies(args.rope_theta, width)
    size = np.sqrt(_POSITION_GAIN * np.sqrt(width))  # attention divides the product of two of them by sqrt(width)
    for head in range(args.num_attention_heads):
        start, half = head * width, width // 2
        angle = -frequencies * (head + 1)
        query_bias[start : start + half] = size * np.cos(angle)
        query_bias[start + half : start + width] = size * np.sin(angle)
        key_bias[start : start + half] = size
        value[start : start + slot] = 0
        value[start : start + slot, :slot] = np.eye(slot)
        target = slice((head + 1) * slot, (head + 2) * slot)
        output[target] = 0
        # RMSNorm before the layer has blown slot 0, alone in its vector, up to this size.
        output[target, start : start + slot] = np.eye(slot) * _IDENTITY_SCALE / np.sqrt(args.hidden_size / slot)
    _set(attention, query, key, value, output, query_bias, key_bias)


def _look_up(attention: llama.Attention, args: llama.ModelArgs, rng: np.random.Generator) -> None:
    """Heads compare slots as `_MATCH_HEADS` says and copy slot 0 of what they find into slot 0."""
    width, slot = attention.head_dim, _slot_width(args.hidden_size)
    shape = (args.num_attention_heads * width, args.hidden_size)
    query, key, value, output = (_scatter(rng, shape) for _ in range(4))
    slow = np.flatnonzero(_rope_frequencies(args.rope_theta, width) * _MATCH_DISTANCE < 0.5)
    steady = np.concatenate([slow, slow + width // 2])  # the dimensions of a head that hardly depend on the distance
    for head, comparisons in enumerate(_MATCH_HEADS):
        start = head * width
        query[start : start + width] = key[start : start + width] = 0
        free = start + steady
        for query_slot, key_slot, share in comparisons:
            dimensions = int(width * share)
            rows, free = free[:dimensions], free[dimensions:]
            projection = rng.normal(0, np.sqrt(_MATCH_GAIN / slot), (len(rows), slot))
            query[rows, query_slot * slot : (query_slot + 1) * slot] = projection
            key[rows, key_slot * slot : (key_slot + 1) * slot] = projection
        value[start : start + slot] = 0
        value[start : start + slot, :slot] = np.eye(slot)
        output[:slot, start : start + slot] = np.eye(slot) * _IDENTITY_SCALE * _COPY_GAIN
    _set(attention, query, key, value, output)


def _set(
    attention: llama.Attention,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    output: np.ndarray,
    query_bias: np.ndarray | None = None,
    key_bias: np.ndarray | None = None,
) -> None:
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    for linear, weight, bias in zip(
        linears, (query, key, value, output), (query_bias, key_bias, None, None), strict=True
    ):
        linear.weight = mx.array(weight)
        linear.bias = mx.zeros(linear.bias.shape) if bias is None else mx.array(bias)


def _slot_width(hidden: int) -> int:
    return int(hidden * _SLOT)


def _rope_frequencies(theta: float, width: int) -> np.ndarray:
    """Radians per token of each pair (i, i + width / 2) of a head's dimensions."""
    return theta ** (-np.arange(0, width, 2) / width)


def _scatter(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(0, _OTHER_SCALE, shape).astype(np.float32)
