"""Samples the next tokens of one request or several from their logits. Evaluates nothing."""

import math
from collections.abc import Callable, Hashable, Sequence
from copy import copy as shallow_copy

import mlx.core as mx

from runner.sampling.filters import Mask, TopP, masked, min_p, top_k
from runner.sampling.options import SamplingOptions
from runner.sampling.penalties import Penalties
from runner.sampling.random_numbers import Uniforms, draw
from runner.sampling.sample import LogprobsRow, SampledTokens, logprobs_of, logprobs_of_candidates

Broadcast = Callable[[mx.array], mx.array]
"""Maps the tokens that this process drew, uint32 [B], to the tokens that count for all processes. Lazy."""


class SamplerRows:
    """Samples the next tokens of requests of one kind. Holds the options and the state of these requests.

    Every operation treats each row by itself, and works the same for one row and for many. So a row draws the same
    tokens as alone. The object belongs to a `Sampler` or a `SamplerBatch`. Owner: the engine thread.
    """

    def __init__(
        self,
        options: Sequence[SamplingOptions],
        draws: Sequence[int],
        penalties: Penalties | None,
        vocab_size: int,
        broadcast: Broadcast | None,
    ) -> None:
        """`options` are the normalised options of each row. `draws` are the numbers of random numbers that the rows
        have used. `broadcast`, if given, maps every token before it becomes part of the history."""
        first, *_ = options
        self._options = options
        self._vocab_size = vocab_size
        self._broadcast = broadcast
        self._greedy = first.temperature == 0
        self._candidates: Callable[[mx.array], mx.array] | None = None
        self._top_p: TopP | None = None
        self._min_p: mx.array | None = None
        self._penalties = penalties
        self._uniforms = Uniforms([each.seed or 0 for each in options], draws)
        if self._greedy:
            return
        # On a CPU, powers of 2 are three times as fast as `mx.exp`, and as accurate: mx.exp computes the same product.
        self._powers = mx.array([[math.log2(math.e) / each.temperature] for each in options])
        if first.top_k > 0:
            self._candidates = top_k(first.top_k, vocab_size)
        if any(each.top_p < 1 for each in options):
            self._top_p = TopP([each.top_p for each in options], first.top_k or vocab_size)
        if any(each.min_p > 0 for each in options):
            self._min_p = mx.array([[each.min_p] for each in options], dtype=mx.float32)

    @staticmethod
    def joined(parts: "Sequence[SamplerRows]") -> "SamplerRows":
        """Returns the rows of all `parts`, in order. The parts must be of one kind, and must not be used afterwards."""
        if len(parts) == 1:
            return parts[0]
        penalties = [part._penalties for part in parts if part._penalties is not None]
        return SamplerRows(
            [each for part in parts for each in part._options],
            [draws for part in parts for draws in part._uniforms.draws],
            Penalties.joined(penalties) if penalties else None,
            parts[0]._vocab_size,
            parts[0]._broadcast,
        )

    def apart(self) -> "list[SamplerRows]":
        """Returns an object for each row, with arrays of its own (lazy). This object must not be used afterwards."""
        if len(self._options) == 1:
            return [self]
        penalties = self._penalties.apart() if self._penalties is not None else [None] * len(self._options)
        rows = zip(self._options, self._uniforms.draws, penalties, strict=True)
        return [SamplerRows([each], [draws], own, self._vocab_size, self._broadcast) for each, draws, own in rows]

    def copy(self) -> "SamplerRows":
        """Returns an independent object with the same state."""
        copied = shallow_copy(self)
        copied._uniforms = self._uniforms.copy()
        copied._penalties = self._penalties.copy() if self._penalties is not None else None
        return copied

    @property
    def kind(self) -> Hashable:
        """The properties that rows must share to be joined."""
        first, *_ = self._options
        # Without top-k, top-p ranks the whole vocabulary, which is slow: rows without top-p get another kind.
        filtered = None if self._greedy else (first.top_k, first.top_k == 0 and first.top_p < 1)
        return filtered, self._penalties.kind if self._penalties is not None else None

    def arrays(self) -> list[mx.array]:
        """Returns the arrays that hold the state between steps."""
        return self._penalties.arrays() if self._penalties is not None else []

    def __call__(self, scores: mx.array) -> mx.array:
        """Returns the next tokens, uint32 [B], for the logits, float32 [B, V]. Lazy: evaluates nothing."""
        if self._penalties is None:
            return self._choose(scores)
        token = self._choose(self._penalties.apply(scores))
        self._penalties.record(token)
        return token

    def draw_ahead(self, scores: mx.array, drafts: Sequence[int]) -> mx.array:
        """Returns the next token of the only row, and the token after each draft, uint32 [1 + D], for the logits,
        float32 [1 + D, V]. Lazy. Changes nothing."""
        if self._penalties is not None:
            scores = self._penalties.apply_ahead(scores, drafts)
        return self._choose(scores, ahead=True)

    def skip(self, tokens: Sequence[int]) -> None:
        """Records tokens that follow in the only row and were not drawn. Later draws are as if all had been drawn."""
        if self._penalties is not None:
            for token in tokens:
                self._penalties.record(mx.array([token], dtype=mx.uint32))
        self._uniforms.skip(len(tokens))

    def _choose(self, scores: mx.array, *, ahead: bool = False) -> mx.array:
        if self._greedy:
            token = mx.argmax(scores, axis=-1)
        elif self._candidates is None:
            token = self._draw(scores, ahead)
        else:
            # Top-k leaves few tokens: the following steps are faster without the rest of the vocabulary.
            ids = self._candidates(scores)
            index = self._draw(mx.take_along_axis(scores, ids, axis=-1), ahead)
            token = mx.take_along_axis(ids, index[:, None], axis=-1)[:, 0]
        return token if self._broadcast is None else self._broadcast(token)

    def _draw(self, scores: mx.array, ahead: bool) -> mx.array:
        # The softmax of scores/temperature, multiplied by a constant: the most probable token has weight 1.
        distance = scores - mx.max(scores, axis=-1, keepdims=True)
        weights = mx.power(2.0, distance * self._powers)
        if self._top_p is not None:
            weights = self._top_p(weights)
        if self._min_p is not None:
            weights = min_p(weights, self._min_p)
        return draw(weights, self._uniforms.ahead(scores.shape[0]) if ahead else self._uniforms.take_next())


class Sampler:
    """The sampler of one request: called once for each token, in order. Owner: the engine thread.

    The order is fixed (docs/internals/wire.md, 4): the mask of the grammar; penalties; argmax if the temperature is 0;
    top-k; softmax of score/temperature; top-p; min-p; draw. The token of each call is part of the history for the next
    call, even before it is read.
    """

    def __init__(
        self,
        options: SamplingOptions,
        prompt: Sequence[int],
        vocab_size: int,
        context_length: int,
        generated: Sequence[int] = (),
        broadcast: Broadcast | None = None,
    ) -> None:
        """`generated` are the tokens of the answer so far: the sampler continues as if it had drawn them. If several
        processes draw each token, `broadcast` returns the token that counts."""
        self.vocab_size = vocab_size
        self.options = options.normalised(vocab_size, context_length)
        """The normalised options, with the random seed if the request had none. An equal sampler can be made from
        them."""
        penalties = None
        if self.options.repeat_last_n > 0:
            penalties = Penalties.of_request(self.options, [*prompt, *generated], vocab_size, context_length)
        self._rows: SamplerRows | None = SamplerRows([self.options], [len(generated)], penalties, vocab_size, broadcast)

    def __call__(self, logits: mx.array, masks: Sequence[Mask | None] = ()) -> SampledTokens:
        """Returns the next token for `logits` [1, V] of any float type. A mask, if given, allows this token. Lazy."""
        logits, scores = _with_masks(logits, masks)
        token, wanted = self._own()(scores), []
        if self.options.candidates:
            wanted = [logprobs_of_candidates(logits, token, self.options.candidates)]
        elif self.options.logprobs:
            wanted = self._logprobs(scores, token, masks)
        return SampledTokens(token, wanted, logits, scores)

    def draw_ahead(self, logits: mx.array, drafts: Sequence[int], masks: Sequence[Mask | None] = ()) -> SampledTokens:
        """Returns a token for each row of `logits` [1 + D, V]: the next token, and the token after each of D drafts.

        Each token is the result of a call after all drafts before it. The state does not change: call `skip` with the
        tokens that are accepted. Lazy: evaluates nothing.
        """
        logits, scores = _with_masks(logits, masks)
        token = self._own().draw_ahead(scores, drafts)
        wanted = self._logprobs(scores, token, masks) if self.options.logprobs else []
        return SampledTokens(token, wanted, logits, scores)

    def _logprobs(self, scores: mx.array, token: mx.array, masks: Sequence[Mask | None]) -> list[LogprobsRow]:
        top = self.options.top_logprobs
        details = logprobs_of(scores, token, top, masks)
        return [LogprobsRow(details, row, top) for row in range(token.size)]

    def skip(self, tokens: Sequence[int]) -> None:
        """Records tokens that follow and were not drawn."""
        self._own().skip(tokens)

    def lend(self) -> SamplerRows:
        """Returns the state, for a batch. Until `take_back`, every use of the sampler raises RuntimeError."""
        rows, self._rows = self._own(), None
        return rows

    def take_back(self, rows: SamplerRows) -> None:
        """Takes back the lent state, with the batch's changes."""
        self._rows = rows

    def _own(self) -> SamplerRows:
        if self._rows is None:
            raise RuntimeError("this sampler's row is in a batch")
        return self._rows


class _Kinds:
    """The rows of several requests. Rows of one kind share one computation, so the time of a step grows with the number
    of kinds."""

    def __init__(self, rows: Sequence[SamplerRows]) -> None:
        """`rows` are the states of all requests, one row each. They must not be used afterwards."""
        kinds: dict[Hashable, list[int]] = {}
        for row, each in enumerate(rows):
            kinds.setdefault(each.kind, []).append(row)
        self.members = list(kinds.values())
        self.rows = [SamplerRows.joined([rows[row] for row in members]) for members in self.members]
        order = [row for members in self.members for row in members]
        self._selections = [_selection(members, len(rows)) for members in self.members]
        self._in_order = _selection([order.index(row) for row in range(len(rows))], len(rows))

    def __call__(self, scores: mx.array) -> mx.array:
        """Returns the next tokens, uint32 [B], for the logits, float32 [B, V]. Lazy: evaluates nothing."""
        groups = zip(self._selections, self.rows, strict=True)
        tokens = [rows(_selected(scores, members)) for members, rows in groups]
        return _selected(tokens[0] if len(tokens) == 1 else mx.concatenate(tokens), self._in_order)


def preview_draws(samplers: Sequence[Sampler]) -> Callable[[mx.array], mx.array]:
    """Returns a function that draws the tokens of the samplers' next calls. The function changes only copies of the
    samplers' states. It maps logits [B, V] of any float type to tokens, uint32 [B]. Lazy."""
    kinds = _Kinds([sampler._own().copy() for sampler in samplers])
    return lambda logits: kinds(logits.astype(mx.float32))


class SamplerBatch:
    """The samplers of several requests while these decode together. Owner: the engine thread."""

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        """Takes over the states of `samplers`, one for each row, in order."""
        self._samplers = samplers
        self._kinds = _Kinds([sampler.lend() for sampler in samplers])
        self._tops = {row: each.options.top_logprobs for row, each in enumerate(samplers) if each.options.logprobs}
        self._asking = _selection([*self._tops], len(samplers))
        self._candidates = {
            row: each.options.candidates for row, each in enumerate(samplers) if each.options.candidates
        }

    def __call__(self, logits: mx.array, masks: Sequence[Mask | None] = ()) -> SampledTokens:
        """Returns the next tokens for `logits` [B, V] of any float type. If a row has a mask, it allows the row's
        token. Lazy: evaluates nothing."""
        logits, scores = _with_masks(logits, masks)
        token = self._kinds(scores)
        wanted: list[LogprobsRow | None] = [None] * token.size if self._tops or self._candidates else []
        if self._tops:
            own = [masks[row] for row in self._tops] if masks else ()
            asked, drawn = _selected(scores, self._asking), _selected(token, self._asking)
            details = logprobs_of(asked, drawn, max(self._tops.values()), own)
            for place, (row, top) in enumerate(self._tops.items()):
                wanted[row] = LogprobsRow(details, place, top)
        for row, candidates in self._candidates.items():
            wanted[row] = logprobs_of_candidates(logits[row : row + 1], token[row : row + 1], candidates)
        return SampledTokens(token, wanted, logits, scores)

    def release(self) -> None:
        """Gives every sampler its state back, as if it had drawn alone. The batch must not be used afterwards. Starts
        the evaluation of each sampler's copy of its state, and does not wait for it: until then the copy keeps the
        state of all rows alive."""
        copies = []
        for members, rows in zip(self._kinds.members, self._kinds.rows, strict=True):
            for row, own in zip(members, rows.apart(), strict=True):
                self._samplers[row].take_back(own)
                copies += own.arrays() if len(members) > 1 else []
        mx.async_eval(copies)


def _with_masks(logits: mx.array, masks: Sequence[Mask | None]) -> tuple[mx.array, mx.array]:
    """Returns the logits in float32, and the same with their masks."""
    logits = logits.astype(mx.float32)
    return logits, masked(logits, masks) if masks else logits


def _selection(rows: Sequence[int], count: int) -> mx.array | None:
    """Returns an index array of `rows`, or None if `rows` are all `count` rows in order."""
    return None if [*rows] == [*range(count)] else mx.array([*rows], dtype=mx.uint32)


def _selected(array: mx.array, rows: mx.array | None) -> mx.array:
    return array if rows is None else array[rows]
