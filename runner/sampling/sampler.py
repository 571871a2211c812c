"""From the logits of one position to the next token, without a look at the result: for one request or for several."""

from collections.abc import Hashable, Sequence

import mlx.core as mx

from runner.sampling import logprobs
from runner.sampling.mask import Mask, masked
from runner.sampling.options import SamplingOptions
from runner.sampling.row_group import Rows
from runner.sampling.sample import Details, Sample, Wish


class Sampler:
    """The sampler of one request: called once for each token, in order, on the engine's thread.

    The order is fixed (docs/internals/wire.md, 4): what the grammar forbids; penalties; greedy if the temperature is 0;
    top-k; softmax of score/temperature; top-p; min-p; draw. Each call takes the token of the call before as part of the
    history, whether or not anybody has read it yet.
    """

    def __init__(
        self,
        options: SamplingOptions,
        prompt: Sequence[int],
        vocab_size: int,
        context_length: int,
        generated: Sequence[int] = (),
    ) -> None:
        """`generated`: what was drawn already; it goes on as if it had drawn that itself."""
        self.options = options.normalised(vocab_size, context_length)
        """In one spelling each and with the seed of an unseeded request: they make the same sampler again."""
        self._rows: Rows | None = Rows.of_request(self.options, prompt, vocab_size, context_length, generated)

    def __call__(self, logits: mx.array, masks: Sequence[Mask | None] = ()) -> Sample:
        """The next token for `logits` [1, V] of any float type, one of its mask if there is one. Lazy: nothing is
        evaluated here."""
        logits = logits.astype(mx.float32)
        token = self._own()(masked(logits, masks) if masks else logits)
        if not self.options.logprobs:
            return Sample(token)
        return Sample(token, [Wish(_details(logits, token, self.options.top_logprobs), 0, self.options.top_logprobs)])

    def skip(self, tokens: Sequence[int]) -> None:
        """These came next, and nothing had to be drawn for it."""
        self._own().skip(tokens)

    def lend(self) -> Rows:
        """Its state, for a batch. Until it is back nothing can be drawn here; raises RuntimeError if it is lent."""
        rows, self._rows = self._own(), None
        return rows

    def take_back(self, rows: Rows) -> None:
        """The state that was lent, as the batch has left it."""
        self._rows = rows

    def _own(self) -> Rows:
        if self._rows is None:
            raise RuntimeError("this sampler's row is in a batch")
        return self._rows


class SamplerBatch:
    """The samplers of several requests, for as long as the same ones decode together. Owned by the engine's thread.

    Rows of one kind go through one computation; what a step costs beyond that grows with the number of kinds.
    """

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        """Takes the states of `samplers` over; their order is the order of the rows."""
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

    def __call__(self, logits: mx.array, masks: Sequence[Mask | None] = ()) -> Sample:
        """The next tokens for `logits` [B, V] of any float type, of their masks where rows have one. Lazy: nothing is
        evaluated here."""
        logits = logits.astype(mx.float32)
        scores = masked(logits, masks) if masks else logits
        tokens = [rows(_selected(scores, members)) for members, rows in self._groups]
        token = _selected(tokens[0] if len(tokens) == 1 else mx.concatenate(tokens), self._in_order)
        if not self._tops:
            return Sample(token)
        asking = self._asking
        details = _details(_selected(logits, asking), _selected(token, asking), max(self._tops.values()))
        wishes: list[Wish | None] = [None] * token.size
        for place, (row, top) in enumerate(self._tops.items()):
            wishes[row] = Wish(details, place, top)
        return Sample(token, wishes)

    def release(self) -> None:
        """Give every sampler its state back, as if it had drawn alone. The batch is not used afterwards.

        Starts the evaluation of what it copies for them, and waits for nothing: until then the copies keep what all the
        rows remember alive.
        """
        copies = []
        for members, (_, rows) in zip(self._members, self._groups, strict=True):
            for row, own in zip(members, rows.apart(), strict=True):
                self._samplers[row].take_back(own)
                copies += own.arrays() if len(members) > 1 else []
        mx.async_eval(copies)


def _selection(rows: Sequence[int], count: int) -> mx.array | None:
    """The index of some of `count` rows; None stands for all of them in order."""
    return None if [*rows] == [*range(count)] else mx.array([*rows], dtype=mx.uint32)


def _selected(array: mx.array, rows: mx.array | None) -> mx.array:
    return array if rows is None else array[rows]


def _details(logits: mx.array, token: mx.array, top: int) -> Details:
    """The log-probabilities of `token` [A] and of the `top` most probable ones, of the model's own logits [A, V]."""
    log_probs = logprobs.log_probabilities(logits)
    logprob = logprobs.of_token(log_probs, token)
    return Details(logprob, *logprobs.most_probable(log_probs, top)) if top > 0 else Details(logprob)
