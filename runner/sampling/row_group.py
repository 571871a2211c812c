"""Rows of one kind, sampled in one computation."""

import math
from collections.abc import Callable, Hashable, Sequence
from copy import copy as shallow_copy

import mlx.core as mx

from runner.sampling import filters
from runner.sampling.options import SamplingOptions
from runner.sampling.penalties import Penalties
from runner.sampling.random_numbers import Uniforms, draw
from runner.sampling.top_k import top_k

Agree = Callable[[mx.array], mx.array]
"""Maps tokens uint32 [B] that were drawn to those that count, where several processes draw the same. Lazy."""


class Rows:
    """The options and the state of requests of one kind, from which their next tokens are sampled.

    Every operation treats each row by itself, and one row like many, so a row draws what it would have drawn alone.
    Belongs to a `Sampler` or a `SamplerBatch`. Owner: the engine thread.
    """

    def __init__(
        self,
        options: Sequence[SamplingOptions],
        draws: Sequence[int],
        penalties: Penalties | None,
        vocab_size: int,
        agree: Agree | None,
    ) -> None:
        """`options` of each row, normalised; `draws`, the number of random numbers that each row has used. Every token
        goes through `agree`, if there is one, before it becomes part of the history."""
        self._options = options
        self._vocab_size = vocab_size
        self._penalties = penalties
        self._agree = agree
        first, *_ = options
        self._greedy = first.temperature == 0
        self._candidates: Callable[[mx.array], mx.array] | None = None
        self._uniforms = Uniforms([wish.seed or 0 for wish in options], draws)
        self._top_p: filters.TopP | None = None
        self._min_p: mx.array | None = None
        if self._greedy:
            return
        # Powers of 2 are three times as fast as `mx.exp` on a CPU and as accurate: mx.exp computes the same product.
        self._powers = mx.array([[math.log2(math.e) / wish.temperature] for wish in options])
        if first.top_k > 0:
            self._candidates = top_k(first.top_k, vocab_size)
        if any(wish.top_p < 1 for wish in options):
            self._top_p = filters.TopP([wish.top_p for wish in options], first.top_k or vocab_size)
        if any(wish.min_p > 0 for wish in options):
            self._min_p = mx.array([[wish.min_p] for wish in options], dtype=mx.float32)

    @staticmethod
    def of_request(
        options: SamplingOptions,
        prompt: Sequence[int],
        vocab_size: int,
        context_length: int,
        generated: Sequence[int],
        agree: Agree | None = None,
    ) -> "Rows":
        """Returns the row of one request whose answer so far is `generated`; `options` are normalised."""
        penalties = None
        if options.repeat_last_n > 0:
            penalties = Penalties.of_request(options, [*prompt, *generated], vocab_size, context_length)
        return Rows([options], [len(generated)], penalties, vocab_size, agree)

    @staticmethod
    def joined(parts: "Sequence[Rows]") -> "Rows":
        """Returns the rows of all `parts`, one after the other. The parts are of one kind, and must not be used
        afterwards."""
        if len(parts) == 1:
            return parts[0]
        penalties = [part._penalties for part in parts if part._penalties is not None]
        return Rows(
            [wish for part in parts for wish in part._options],
            [number for part in parts for number in part._uniforms.draws],
            Penalties.joined(penalties) if penalties else None,
            parts[0]._vocab_size,
            parts[0]._agree,
        )

    def apart(self) -> "list[Rows]":
        """Returns each row by itself, with arrays of its own (lazy). This object must not be used afterwards."""
        if len(self._options) == 1:
            return [self]
        penalties = self._penalties.apart() if self._penalties is not None else [None] * len(self._options)
        rows = zip(self._options, self._uniforms.draws, penalties, strict=True)
        return [Rows([wish], [number], own, self._vocab_size, self._agree) for wish, number, own in rows]

    def copy(self) -> "Rows":
        """Returns another object of the same state; what one of them draws, the other does not see."""
        copied = shallow_copy(self)
        copied._uniforms = self._uniforms.copy()
        copied._penalties = self._penalties.copy() if self._penalties is not None else None
        return copied

    @property
    def kind(self) -> Hashable:
        """The properties that rows must share to be joined."""
        first, *_ = self._options
        # Without top-k, top-p ranks the whole vocabulary, which is costly: rows without top-p are kept apart from it.
        filtered = None if self._greedy else (first.top_k, first.top_k == 0 and first.top_p < 1)
        return filtered, self._penalties.kind if self._penalties is not None else None

    def arrays(self) -> list[mx.array]:
        """Returns the arrays that hold the state from one step to the next."""
        return self._penalties.arrays() if self._penalties is not None else []

    def __call__(self, scores: mx.array) -> mx.array:
        """Returns the next tokens, uint32 [B], for the logits, float32 [B, V]. Lazy: evaluates nothing."""
        if self._penalties is None:
            return self._choose(scores)
        token = self._choose(self._penalties.apply(scores))
        self._penalties.record(token)
        return token

    def draw_ahead(self, scores: mx.array, drafts: Sequence[int]) -> mx.array:
        """Returns the next token of the only row, and the one behind each of these drafts, for the logits float32
        [1 + D, V]: uint32 [1 + D]. Lazy, and changes nothing."""
        if self._penalties is not None:
            scores = self._penalties.apply_ahead(scores, drafts)
        return self._choose(scores, ahead=True)

    def skip(self, tokens: Sequence[int]) -> None:
        """Records tokens that came next in the only row without a draw. Later draws are as if each had been drawn."""
        if self._penalties is not None:
            for token in tokens:
                self._penalties.record(mx.array([token], dtype=mx.uint32))
        self._uniforms.skip(len(tokens))

    def _choose(self, scores: mx.array, *, ahead: bool = False) -> mx.array:
        token = self._drawn(scores, ahead)
        return token if self._agree is None else self._agree(token)

    def _drawn(self, scores: mx.array, ahead: bool) -> mx.array:
        if self._greedy:
            return mx.argmax(scores, axis=-1)
        if self._candidates is None:
            return self._draw(scores, ahead)
        # Top-k leaves so few tokens that it pays to drop the rest of the vocabulary.
        ids = self._candidates(scores)
        index = self._draw(mx.take_along_axis(scores, ids, axis=-1), ahead)
        return mx.take_along_axis(ids, index[:, None], axis=-1)[:, 0]

    def _draw(self, scores: mx.array, ahead: bool) -> mx.array:
        # Softmax of scores/temperature up to a constant: the most probable token has weight 1.
        distance = scores - mx.max(scores, axis=-1, keepdims=True)
        weights = mx.power(2.0, distance * self._powers)
        if self._top_p is not None:
            weights = self._top_p(weights)
        if self._min_p is not None:
            weights = filters.min_p(weights, self._min_p)
        return draw(weights, self._uniforms.ahead(scores.shape[0]) if ahead else self._uniforms.take())
