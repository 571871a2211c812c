"""Generations that decode in step: one forward for all of them."""

from collections.abc import Sequence
from itertools import count
from typing import TypeAlias

import mlx.core as mx

from runner.cache.rows import Rows
from runner.engine.events import Event
from runner.engine.generation import Forward, Generation
from runner.engine.trace import TRACE
from runner.sampling.sample import Choice, Sample
from runner.sampling.sampler import Sampler, SamplerBatch

_CLEAR_STEPS = 256  # mlx-lm's caches grow in steps of as many, each time into new buffers
_PADDING_TOKENS = 256  # a row may always be padded so far
_ids = count()

Results: TypeAlias = list[tuple[Generation, list[Event]]]
"""Of generations: what there is to tell."""


class Group:
    """One generation, which decodes on its own layers, or several on copies of theirs.

    From the second step on the forward of the next token is on its way before the present one is read. When a step of
    several raises, nobody has taken anything of it: each can be set back to what its own layers have seen, and go on
    alone.
    """

    def __init__(self, generation: Generation, forward: Forward) -> None:
        """The generation has been prefilled."""
        self.id = next(_ids)
        self.generations = [generation]
        self._forward = forward
        self._rows = Rows(generation.session)
        self._sampler: Sampler | SamplerBatch | None = None
        self._ahead: Sample | None = None  # dispatched, not yet read
        self._own: dict[Generation, Sample] = {}  # what each drew on its own layers, and has not taken yet
        self.steps = 0
        """How many there have been."""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds beside the layers of its generations."""
        return self._rows.nbytes

    def step(self) -> list[Choice]:
        """The next token of each, for `take`."""
        current = self._ahead or self._draw(
            self._run(mx.array([generation.start_decode() for generation in self.generations]))
        )
        self._ahead = logits = None
        constrained = any(generation.constrained for generation in self.generations)
        # Not before the first token is read: it would come a forward later where a CPU computes while it is told to.
        if self.steps and any(generation.wants_more for generation in self.generations):
            logits = self._run(current.token[:, None])
            if constrained:
                mx.async_eval([logits, *self._rows.arrays()])
            else:
                self._ahead = self._draw(logits)
        choices = current.read()
        TRACE.lap("wait")
        if constrained:
            choices = self._follow(choices)
            if logits is not None:
                self._ahead = self._draw_on(logits, choices)
        self._own.clear()
        self.steps += 1
        if self.steps % _CLEAR_STEPS == 0:
            mx.clear_cache()  # the layers have outgrown their buffers, and nothing else is as large as those
        return choices

    def take(self, choices: Sequence[Choice]) -> Results:
        """Give each its token, which `step` returned."""
        pairs = zip(self.generations, choices, strict=True)
        return [(generation, generation.take(choice)) for generation, choice in pairs]

    def accepts(self, other: "Group") -> bool:
        """Whether the one generation of `other` may join. Rows are as long as the longest: one that is much shorter
        would cost more in padding than its own forwards do."""
        if self._ahead is None or other._ahead is None or len(other.generations) > 1:
            return False
        if not all(generation.sociable for generation in (*self.generations, *other.generations)):
            return False
        lengths = [*self._rows.lengths, *other._rows.lengths]
        return max(lengths) * len(lengths) <= 2 * sum(lengths) + _PADDING_TOKENS * len(lengths)

    @property
    def batchable(self) -> bool:
        """Whether its layers are of kinds that can be joined, as far as their clocks were found to be right."""
        return self._rows.batchable

    def padded(self, other: "Group") -> int:
        """Tokens of the longest of both."""
        return max(*self._rows.lengths, *other._rows.lengths)

    def join(self, other: "Group") -> None:
        """Take over the one generation of `other`, between two steps. If it raises, `other` is as it was, and so is
        this one if it was alone."""
        assert self._ahead is not None
        assert other._ahead is not None
        ahead = Sample.joined([self._ahead, other._ahead])
        self._release()
        other._release()
        rows = self._rows if len(self.generations) > 1 else Rows(self.generations[0].session)
        rows.join(other._rows)
        self._rows = rows
        if len(self.generations) == 1:
            self._own[self.generations[0]] = self._ahead
        self._own[other.generations[0]] = other._ahead
        self._ahead = ahead
        self.generations += other.generations

    def leave(self, leaving: Sequence[Generation]) -> None:
        """These go, each with its own layers as far as it got. If it raises, the others are good for nothing but being
        set back."""
        rows = self.generations
        staying = [row for row, generation in enumerate(rows) if generation not in leaving]
        self.generations = [rows[row] for row in staying]
        self._release()
        if self._ahead is not None and staying:
            self._ahead = self._ahead.take(staying)
        for row, generation in enumerate(rows):
            if row not in staying:
                try:
                    self._rows.settle(row)
                except Exception as error:
                    generation.fail(error)
        self._rows.keep(staying)  # last: what has settled has seen the token that it would be set back to

    def disband(self, error: Exception) -> Results:
        """After this error of several: each is set back, and takes what it drew on its own layers, if it has not. One
        that lost its own layers by it has failed."""
        results: Results = []
        for generation in self.generations:
            own = self._own.get(generation)
            # With nothing of its own to take, its layers must not have seen the token that it would be set back to.
            seen_all = own is None and generation.session.position >= len(generation.session.recorded)
            if generation.session.failed or seen_all:
                results.append((generation, generation.fail(error)))
                continue
            events: list[Event] = []
            try:
                if own:
                    generation.retrace()
                    events += generation.take(generation.follow(own.read()[0], alone=False))
                if not generation.done:
                    generation.set_back()
            except Exception as fault:
                events += generation.fail(fault)
            results.append((generation, events))
        return results

    def _follow(self, choices: Sequence[Choice]) -> list[Choice]:
        """Lead the grammars along what was read."""
        alone = len(choices) == 1
        pairs = zip(self.generations, choices, strict=True)
        followed = [generation.follow(choice, alone=alone) for generation, choice in pairs]
        TRACE.lap("grammar")
        return followed

    def _draw_on(self, logits: mx.array, choices: Sequence[Choice]) -> Sample | None:
        """The next tokens behind these, the forward over which is on its way; None if nothing comes behind them."""
        pairs = [*zip(self.generations, choices, strict=True)]
        if all(generation.ends_with(choice) for generation, choice in pairs):
            return None
        if choices[0].follow:
            logits = self._run(mx.array([choices[0].follow]))
        return self._draw(logits)

    def _run(self, tokens: mx.array) -> mx.array:
        """The forward over these tokens of each [B, L]; its logits [B, L, V]. L is 1 for several."""
        with self._rows.forward(tokens.shape[1]):
            logits = self._forward(tokens, self._rows.layers)
        TRACE.lap("forward")
        return logits

    def _draw(self, logits: mx.array) -> Sample:
        """Start the sampling of the next token of each, and the forward if it was not."""
        if self._sampler is None:
            if self.steps:
                mx.clear_cache()  # others have come or gone, and with them buffers of other sizes
            samplers = [generation.sampler(logits.shape[-1]) for generation in self.generations]
            self._sampler = samplers[0] if len(samplers) == 1 else SamplerBatch(samplers)
        masks = [generation.mask for generation in self.generations]
        sample = self._sampler(logits[:, -1, :], masks if any(masks) else ())
        TRACE.lap("sample")
        mx.async_eval([*sample.arrays(), *self._rows.arrays()])
        TRACE.lap("dispatch")
        return sample

    def _release(self) -> None:
        if isinstance(self._sampler, SamplerBatch):
            self._sampler.release()
        self._sampler = None
