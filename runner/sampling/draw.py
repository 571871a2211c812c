"""One random token from weights."""

import mlx.core as mx


def draw(weights: mx.array, uniform: mx.array) -> mx.array:
    """An index [B] into each row of `weights` [B, N], taken with a probability in proportion to its weight.

    `uniform` [B, 1] is looked up in the cumulative weights: for one row that is how `mx.random.categorical` draws from
    log-probabilities, and with the number that its key makes the same token is drawn. It is written out because the
    weights are at hand (their logarithms and the exponentials of those cost more than all the rest), because
    `categorical` goes another way as soon as there are two rows, and because this way an index of weight 0 is never
    taken: a uniform number is at most 1 - 2**-24, so its product with the largest cumulative weight is less than that,
    and a GPU, which sums in blocks and so gives neighbours of weight 0 sums that differ, is not asked about these.
    """
    cumulative = mx.where(weights > 0, mx.cumsum(weights, axis=-1), 0)
    return mx.argmax(cumulative > uniform * mx.max(cumulative, axis=-1, keepdims=True), axis=-1)
