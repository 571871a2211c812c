"""Chooses tokens from logits: penalties, masks, filters, seeded draws, log-probabilities.

All of it is lazy: a step only adds to MLX's graph. Rows of a batch that are of one kind are sampled together, with the
same operations as a single row, so each row draws the tokens that it would draw alone.

Owners: `SamplingOptions` are immutable and need no MLX; they are made off the engine thread. Everything else belongs to
the engine thread.

Read in this order: `options`, `sampler` (rows sampled together), `sample` (the result); then the steps: `penalties`,
`filters`, `random_numbers`.
"""

from runner.sampling.options import SamplingOptions

__all__ = ["SamplingOptions"]
