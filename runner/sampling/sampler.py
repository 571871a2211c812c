"""From the logits of one position to the next token, without a look at the result."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from runner.sampling import filters, logprobs
from runner.sampling.draw import draw
from runner.sampling.options import SamplingOptions
from runner.sampling.penalties import Penalties
from runner.sampling.seeds import Uniforms


class Sample(NamedTuple):
    """The next token and what was asked about it. Nothing is evaluated; pass `arrays()` to `mx.async_eval`."""

    token: mx.array
    """uint32 [1]"""
    logprob: mx.array | None = None
    """float32 [1]"""
    top_ids: mx.array | None = None
    """uint32 [1, K], the most probable token first"""
    top_logprobs: mx.array | None = None
    """float32 [1, K]"""

    def arrays(self) -> list[mx.array]:
        """All there is to evaluate.

        The sampler's own state is not among it: each token depends on the state before it, so the evaluation of a token
        brings the state up to it, and one step is all that is ever pending.
        """
        return [array for array in (self.token, self.logprob, self.top_ids, self.top_logprobs) if array is not None]


class Sampler:
    """The sampler of one request: called once for each token, in order, on the engine's thread.

    The order is fixed (protocol.md, section 4): penalties; greedy if the temperature is 0; top-k; softmax of
    score/temperature; top-p; min-p; draw. Each call takes the token of the call before as part of the history, whether
    or not anybody has read it yet.
    """

    def __init__(self, options: SamplingOptions, prompt: Sequence[int], vocab_size: int, context_length: int) -> None:
        self._options = options = options.normalised(vocab_size, context_length)
        assert options.seed is not None
        self._uniforms = Uniforms(options.seed)
        self._top_p = filters.TopP(options.top_p, options.top_k or vocab_size) if options.top_p < 1 else None
        self._penalties: Penalties | None = None
        if options.repeat_last_n > 0:
            self._penalties = Penalties(options, prompt, vocab_size, context_length)

    def __call__(self, logits: mx.array) -> Sample:
        """The next token for `logits` [1, V] of any float type. Lazy: nothing is evaluated here."""
        logits = logits.astype(mx.float32)
        scores = logits
        if self._penalties is not None:
            scores = self._penalties.apply(scores)
        token = self._choose(scores)
        if self._penalties is not None:
            self._penalties.record(token)
        if not self._options.logprobs:
            return Sample(token)
        log_probs = logprobs.log_probabilities(logits)
        top_ids, top_logprobs = None, None
        if self._options.top_logprobs > 0:
            top_ids, top_logprobs = logprobs.most_probable(log_probs, self._options.top_logprobs)
        return Sample(token, logprobs.of_token(log_probs, token), top_ids, top_logprobs)

    def _choose(self, scores: mx.array) -> mx.array:
        if self._options.temperature == 0:
            return mx.argmax(scores, axis=-1)
        if self._options.top_k == 0:
            return self._draw(scores)
        # What top-k leaves is so little that it pays to go on without the rest of the vocabulary. The ids ascend, so
        # a seed draws what it would have drawn from the whole.
        ids = filters.top_k_ids(scores, self._options.top_k)
        index = self._draw(mx.take_along_axis(scores, ids, axis=-1))
        return mx.take_along_axis(ids, index[:, None], axis=-1)[:, 0]

    def _draw(self, scores: mx.array) -> mx.array:
        # Softmax of scores/temperature up to a constant: the most probable token has weight 1. As a power of 2 because
        # that is three times as fast as `mx.exp` on a CPU, and no less accurate: mx.exp computes the same product.
        distance = scores - mx.max(scores, axis=-1, keepdims=True)
        weights = mx.power(2.0, distance * (math.log2(math.e) / self._options.temperature))
        if self._top_p is not None:
            weights = self._top_p(weights)
        if self._options.min_p > 0:
            weights = filters.min_p(weights, self._options.min_p)
        return draw(weights, self._uniforms.take())
