"""Logits to tokens: penalties, filters, seeded draws, log-probabilities."""

from runner.sampling.options import SamplingOptions
from runner.sampling.sampler import Sample, Sampler

__all__ = ["Sample", "Sampler", "SamplingOptions"]
