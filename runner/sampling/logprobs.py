"""Log-probabilities for clients: of the model's own logits after the mask of the grammar, before penalties."""

import mlx.core as mx

from runner.sampling import sort_keys

FLOOR = -9999.0
"""The lowest log-probability that is reported: JSON has no -Infinity."""


def log_probabilities(logits: mx.array) -> mx.array:
    """Returns the log-softmax, float32 [B, V], of `logits` (float32 [B, V]): FLOOR to 0 for finite logits."""
    # Relative to the largest: a float32 near 1000 has too few digits after the point.
    shifted = logits - mx.max(logits, axis=-1, keepdims=True)
    return mx.maximum(shifted - mx.logsumexp(shifted, axis=-1, keepdims=True), FLOOR)


def of_token(log_probs: mx.array, token: mx.array) -> mx.array:
    """Returns the log-probability [B] of `token` (uint32 [B])."""
    return mx.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0]


def most_probable(log_probs: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Returns ids (uint32 [B, k]) and log-probabilities [B, k] of the k most probable tokens, most probable first.

    0 < k <= V. Equal ones come in the order of their ids, so the first is the token that greedy decoding takes.
    """
    keys = sort_keys.keys(mx.abs(log_probs), sort_keys.ascending_ids(log_probs.shape[-1]))
    if k < keys.shape[-1]:
        keys = mx.partition(keys, k - 1, axis=-1)[..., :k]
    ids = sort_keys.ids_of(mx.sort(keys, axis=-1))
    return ids, mx.take_along_axis(log_probs, ids, axis=-1)
