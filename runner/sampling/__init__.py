"""Chooses tokens from logits: penalties, masks, filters, seeded draws, log-probabilities.

Everything is lazy: sampling only adds to MLX's graph. Rows of a batch are sampled together if they are of one kind,
with the same operations as a single row. So each row draws the tokens that it would draw alone.

Owners: any thread may make `SamplingOptions`, which are immutable. Everything else belongs to the engine thread.

Read in this order: `options`, `sampler` (rows sampled together), `sample` (the result); then the parts of sampling:
`penalties`, `filters`, `random_numbers`.
"""

from runner.sampling.options import SamplingOptions

__all__ = ["SamplingOptions"]
