"""Draws one random token per row from weights."""

import mlx.core as mx


def draw(weights: mx.array, uniform: mx.array) -> mx.array:
    """Returns an index [B] into each row of `weights` [B, N], with probabilities in proportion to the weights.

    Looks up `uniform` [B, 1] in the cumulative weights. For one row, `mx.random.categorical` draws from
    log-probabilities in the same way, and draws the same token for the number that its key makes. It is written out for
    three reasons. The weights are at hand; taking logarithms and their exponentials would cost more than all the rest.
    `categorical` works differently for two or more rows. And an index of weight 0 is never drawn: a uniform number is
    at most 1 - 2**-24, so its product with the largest cumulative weight is less than that weight. A GPU sums in blocks
    and may give adjacent indices of weight 0 different sums; these are set to 0.
    """
    cumulative = mx.where(weights > 0, mx.cumsum(weights, axis=-1), 0)
    return mx.argmax(cumulative > uniform * mx.max(cumulative, axis=-1, keepdims=True), axis=-1)
