"""Logits to tokens: penalties, filters, seeded draws, log-probabilities.

What a request asks for needs no MLX and is made off the engine thread; `runner.sampling.sampler` does.
"""

from runner.sampling.options import SamplingOptions

__all__ = ["SamplingOptions"]
