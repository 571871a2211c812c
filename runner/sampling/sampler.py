"""Samples the next token from the logits of one position, for one request or several. Evaluates nothing."""

from collections.abc import Callable, Hashable, Sequence

import mlx.core as mx

from runner.sampling import logprobs
from runner.sampling.mask import Mask, masked
from runner.sampling.options import SamplingOptions
from runner.sampling.row_group import Agree, Rows
from runner.sampling.sample import Details, Sample, Wish


class Sampler:
    """The sampler of one request: called once for each token, in order. Owner: the engine thread.

    The order is fixed (docs/internals/wire.md, 4): the mask of the grammar; penalties; argmax if the temperature is 0;
    top-k; softmax of score/temperature; top-p; min-p; draw. The token of each call is part of the history of the next
    one, whether it has been read or not.
    """

    def __init__(
        self,
        options: SamplingOptions,
        prompt: Sequence[int],
        vocab_size: int,
        context_length: int,
        generated: Sequence[int] = (),
        agree: Agree | None = None,
    ) -> None:
        """`generated` are the tokens so far: the sampler continues as if it had drawn them. Where several processes
        draw the same token, `agree` says which one counts."""
        self.vocab_size = vocab_size
        self.options = options.normalised(vocab_size, context_length)
        """The normalised options, with the seed that an unseeded request got: they make the same sampler again."""
        self._rows: Rows | None = Rows.of_request(self.options, prompt, vocab_size, context_length, generated, agree)

    def __call__(self, logits: mx.array, masks: Sequence[Mask | None] = ()) -> Sample:
        """Returns the next token for `logits` [1, V] of any float type; it is in the mask, if there is one. Lazy:
        evaluates nothing."""
        logits = logits.astype(mx.float32)
        scores = masked(logits, masks) if masks else logits
        token = self._own()(scores)
        if self.options.candidates:
            return Sample(token, [_scored(logits, token, self.options.candidates)])
        if not self.options.logprobs:
            return Sample(token)
        top = self.options.top_logprobs
        return Sample(token, [Wish(_details(scores, token, top, masks), 0, top)])

    def draw_ahead(self, logits: mx.array, drafts: Sequence[int], masks: Sequence[Mask | None] = ()) -> Sample:
        """Returns a token for each row of `logits` [1 + D, V]: the next one, and the one behind each of D drafts.

        Each is what a call would return if all drafts before it had come. The state stays as it is: `skip` the tokens
        that did come. Lazy: evaluates nothing.
        """
        logits = logits.astype(mx.float32)
        scores = masked(logits, masks) if masks else logits
        token = self._own().draw_ahead(scores, drafts)
        if not self.options.logprobs:
            return Sample(token)
        top = self.options.top_logprobs
        details = _details(scores, token, top, masks)
        return Sample(token, [Wish(details, row, top) for row in range(len(drafts) + 1)])

    def preview(self) -> Callable[[mx.array], mx.array]:
        """Returns a function that draws what the next calls would: it maps logits [1, V] of any float type to a token,
        uint32 [1], which is part of its own history from then on. The sampler stays as it is. Lazy: evaluates
        nothing."""
        rows = self._own().copy()
        return lambda logits: rows(logits.astype(mx.float32))

    def skip(self, tokens: Sequence[int]) -> None:
        """Records tokens that came next without a draw."""
        self._own().skip(tokens)

    def lend(self) -> Rows:
        """Returns the state, for a batch. Until it is taken back, the sampler raises RuntimeError when it is used."""
        rows, self._rows = self._own(), None
        return rows

    def take_back(self, rows: Rows) -> None:
        """Takes back the state that was lent, as the batch has left it."""
        self._rows = rows

    def _own(self) -> Rows:
        if self._rows is None:
            raise RuntimeError("this sampler's row is in a batch")
        return self._rows


class SamplerBatch:
    """The samplers of several requests, for as long as the same ones decode together. Owner: the engine thread.

    Rows of one kind share one computation, so the cost of a step grows with the number of kinds.
    """

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        """Takes over the states of `samplers`, whose order is that of the rows."""
        self._samplers = samplers
        lent = [sampler.lend() for sampler in samplers]
        kinds: dict[Hashable, list[int]] = {}
        for row, rows in enumerate(lent):
            kinds.setdefault(rows.kind, []).append(row)
        self._members = list(kinds.values())
        self._groups = [
            (_selection(members, len(lent)), Rows.joined([lent[row] for row in members])) for members in self._members
        ]
        order = [row for members in self._members for row in members]
        self._in_order = _selection([order.index(row) for row in range(len(lent))], len(lent))
        tops = {row: sampler.options.top_logprobs for row, sampler in enumerate(samplers) if sampler.options.logprobs}
        self._asking = _selection([*tops], len(lent))
        self._tops = tops
        self._candidates = {
            row: sampler.options.candidates for row, sampler in enumerate(samplers) if sampler.options.candidates
        }

    def __call__(self, logits: mx.array, masks: Sequence[Mask | None] = ()) -> Sample:
        """Returns the next tokens for `logits` [B, V] of any float type; the token of a row with a mask is in the
        mask. Lazy: evaluates nothing."""
        logits = logits.astype(mx.float32)
        scores = masked(logits, masks) if masks else logits
        tokens = [rows(_selected(scores, members)) for members, rows in self._groups]
        token = _selected(tokens[0] if len(tokens) == 1 else mx.concatenate(tokens), self._in_order)
        if not self._tops and not self._candidates:
            return Sample(token)
        wishes: list[Wish | None] = [None] * token.size
        if self._tops:
            asking = self._asking
            top = max(self._tops.values())
            own = [masks[row] for row in self._tops] if masks else ()
            details = _details(_selected(scores, asking), _selected(token, asking), top, own)
            for place, (row, top) in enumerate(self._tops.items()):
                wishes[row] = Wish(details, place, top)
        for row, candidates in self._candidates.items():
            wishes[row] = _scored(logits[row : row + 1], token[row : row + 1], candidates)
        return Sample(token, wishes)

    def release(self) -> None:
        """Gives every sampler its state back, as if it had drawn alone. The batch must not be used afterwards.

        Dispatches the copies without waiting for them: until they are evaluated, each keeps the state of all rows
        alive.
        """
        copies = []
        for members, (_, rows) in zip(self._members, self._groups, strict=True):
            for row, own in zip(members, rows.apart(), strict=True):
                self._samplers[row].take_back(own)
                copies += own.arrays() if len(members) > 1 else []
        mx.async_eval(copies)


def _selection(rows: Sequence[int], count: int) -> mx.array | None:
    """Returns the index of some of `count` rows; None stands for all of them in order."""
    return None if [*rows] == [*range(count)] else mx.array([*rows], dtype=mx.uint32)


def _selected(array: mx.array, rows: mx.array | None) -> mx.array:
    return array if rows is None else array[rows]


def _scored(logits: mx.array, token: mx.array, candidates: Sequence[int]) -> Wish:
    """Returns the log-probabilities of the candidates, of the raw logits [1, V], in place of the most probable ones."""
    log_probs, ids = logprobs.log_probabilities(logits), mx.array([candidates], dtype=mx.uint32)
    values = mx.take_along_axis(log_probs, ids, axis=-1)
    return Wish(Details(logprobs.of_token(log_probs, token), ids, values), 0, len(candidates))


def _details(scores: mx.array, token: mx.array, top: int, masks: Sequence[Mask | None]) -> Details:
    """Returns the log-probabilities of `token` [A] and of the `top` most probable tokens, of the logits [A, V] with
    their masks; those of forbidden tokens are -inf."""
    log_probs = logprobs.log_probabilities(scores)
    log_probs = masked(log_probs, masks) if masks else log_probs
    logprob = logprobs.of_token(log_probs, token)
    return Details(logprob, *logprobs.most_probable(log_probs, top)) if top > 0 else Details(logprob)
