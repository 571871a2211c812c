"""Generations that decode in step: one forward for all of them."""

from collections.abc import Sequence
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import mlx.core as mx

from runner.cache.decode_rows import DecodeRows
from runner.engine.events import Event, Outbox
from runner.engine.generation import Forward, Generation
from runner.engine.trace import TRACE
from runner.sampling.sample import Choice, Sample
from runner.sampling.sampler import Sampler, SamplerBatch

if TYPE_CHECKING:
    from runner.grammar import Guide

_CLEAR_STEPS = 256  # mlx-lm's caches grow in steps of as many, each time into new buffers
_PADDING_TOKENS = 256  # a row may always be padded so far
_PATIENCE_S = 0.05  # with a grammar in company; then its answer goes on alone
_PATIENCE_ALONE_S = 0.005  # then others have their turn
_ids = count()

Results: TypeAlias = list[tuple[Generation, list[Event]]]
"""Of generations: what there is to tell."""


class _Awaited(NamedTuple):
    """A step that goes on when the grammars have been led along its tokens."""

    choices: list[Choice]
    logits: mx.array | None
    """[B, 1, V], of the forward over these tokens; None if there was none."""

    def of(self, rows: Sequence[int]) -> "_Awaited":
        logits = None if self.logits is None else self.logits[mx.array([*rows])]
        return _Awaited([self.choices[row] for row in rows], logits)


class Batch:
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
        self._rows = DecodeRows(generation.session)
        self._sampler: Sampler | SamplerBatch | None = None
        self._ahead: Sample | None = None  # dispatched, not yet read
        self._own: dict[Generation, Sample] = {}  # what each drew on its own layers, and has not taken yet
        self._awaited: _Awaited | None = None
        self._lost: Results = []
        self.parted: list[Batch] = []
        """Those whose grammars took too long for the others: each goes on in a group of its own. Take them out."""
        self.steps = 0
        """How many there have been."""

    @property
    def _guides(self) -> "list[Guide]":
        """Those of the answers that follow a grammar."""
        return [generation.guide for generation in self.generations if generation.guide is not None]

    @property
    def nbytes(self) -> int:
        """Bytes that it holds beside the layers of its generations."""
        return self._rows.nbytes

    @property
    def ready(self) -> bool:
        """Whether it can step: not while a grammar is being followed, which takes as long as the grammar makes it."""
        guides = self._guides
        return not guides or all(guide.wait(0.0) for guide in guides)

    def step(self) -> list[Choice]:
        """The next token of each, for `take`. None yet if a grammar takes long; when it is ready, step again."""
        if TRACE.on:
            TRACE.name("decode", rows=len(self.generations))
        guided = bool(self._guides)
        self._awaited = awaited = self._awaited or self._read(guided)
        if guided:
            if not self._wait():
                return []
            awaited = self._awaited._replace(choices=self._follow(self._awaited.choices))  # of those who have stayed
            if awaited.logits is not None and self._ahead is None:
                self._ahead = self._draw_on(awaited.logits, awaited.choices)
        self._awaited = None
        self._own.clear()
        self.steps += 1
        if self.steps % _CLEAR_STEPS == 0:
            mx.clear_cache()  # the layers have outgrown their buffers, and nothing else is as large as those
        return awaited.choices

    def _read(self, guided: bool) -> _Awaited:
        """The next token of each, read. The forward behind it is on its way, and so are the masks, if any."""
        current = self._ahead or self._draw(
            self._run(mx.array([generation.start_decode() for generation in self.generations]))
        )
        self._ahead = logits = None
        # Not before the first token is read: it would come a forward later where a CPU computes while it is told to.
        if self.steps and any(generation.room > 1 for generation in self.generations):
            logits = self._run(current.token[:, None])
            if guided:
                mx.async_eval([logits, *self._rows.arrays()])
            else:
                self._ahead = self._draw(logits)
        choices = current.read()
        if TRACE.on:
            TRACE.lap("wait")
        if guided:
            for generation, choice in zip(self.generations, choices, strict=True):
                generation.lead(choice)
        return _Awaited(choices, logits)

    def _wait(self) -> bool:
        """Waits for the masks. Whose takes too long for the others parts. Returns whether all are there."""
        until_s = monotonic() + (_PATIENCE_S if len(self.generations) > 1 else _PATIENCE_ALONE_S)
        late = [each for each in self.generations if not each.wait(max(0.0, until_s - monotonic()))]
        TRACE.lap("grammar")
        if not late or len(late) == len(self.generations):
            return not late
        everyone, awaited = self.generations, self._awaited
        assert awaited is not None
        try:
            self._lost += self.leave(late)
        except Exception:
            self.generations = everyone
            raise
        for generation in late:
            if not generation.done:
                generation.sociable = False
                group = Batch(generation, self._forward)
                group.steps = self.steps
                group._awaited = awaited.of([everyone.index(generation)])
                self.parted.append(group)
        return True

    def take(self, choices: Sequence[Choice]) -> Results:
        """Give each its token, which `step` returned."""
        pairs = zip(self.generations, choices, strict=True)
        lost, self._lost = self._lost, []
        results = lost + [(generation, generation.take(choice)) for generation, choice in pairs]
        if TRACE.on:
            TRACE.lap("text")
        return results

    def accepts(self, other: "Batch") -> bool:
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

    def padded(self, other: "Batch") -> int:
        """Tokens of the longest of both."""
        return max(*self._rows.lengths, *other._rows.lengths)

    def join(self, other: "Batch") -> None:
        """Take over the one generation of `other`, between two steps. If it raises, `other` is as it was, and so is
        this one if it was alone."""
        assert self._ahead is not None
        assert other._ahead is not None
        ahead = Sample.joined([self._ahead, other._ahead])
        self._release()
        other._release()
        rows = self._rows if len(self.generations) > 1 else DecodeRows(self.generations[0].session)
        rows.join(other._rows)
        self._rows = rows
        if len(self.generations) == 1:
            self._own[self.generations[0]] = self._ahead
        self._own[other.generations[0]] = other._ahead
        self._ahead = ahead
        self.generations += other.generations

    def leave(self, leaving: Sequence[Generation]) -> Results:
        """These go, each with its own layers as far as it got; returns those that got no layers, by which they failed.
        If it raises, the others are good for nothing but being set back."""
        rows = self.generations
        staying = [row for row, generation in enumerate(rows) if generation not in leaving]
        self.generations = [rows[row] for row in staying]
        self._release()
        if self._ahead is not None and staying:
            self._ahead = self._ahead.take(staying)
        if self._awaited is not None and staying:
            self._awaited = self._awaited.of(staying)
        failed: Results = []
        for row, generation in enumerate(rows):
            if row not in staying:
                try:
                    self._rows.settle(row)
                except Exception as error:
                    failed.append((generation, generation.fail(error)))
        self._rows.keep(staying)  # last: what has settled has seen the token that it would be set back to
        return failed

    def disband(self, error: Exception) -> Results:
        """After this error of several: each is set back, and takes what it drew on its own layers, if it has not. One
        that lost its own layers by it has failed."""
        results, self._lost = self._lost, []
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
                    generation.lead(choice := own.read()[0])
                    if generation.wait(_PATIENCE_S):
                        events += generation.take(generation.follow(choice, alone=False))
                    else:
                        events += generation.turn_away("its grammar takes too long to be followed again")
                if not generation.done:
                    generation.set_back()
            except Exception as fault:
                events += generation.fail(fault)
            results.append((generation, events))
        return results

    def _follow(self, choices: Sequence[Choice]) -> list[Choice]:
        """What comes behind these tokens without a choice, along which the grammars have been led."""
        alone = len(choices) == 1
        pairs = zip(self.generations, choices, strict=True)
        return [generation.follow(choice, alone=alone) for generation, choice in pairs]

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
        logits = self._rows.compute(self._forward, tokens)
        if TRACE.on:
            TRACE.lap("forward")
        return logits

    def _draw(self, logits: mx.array) -> Sample:
        """Start the sampling of the next token of each, and the forward if it was not."""
        if self._sampler is None:
            if self.steps:
                mx.clear_cache()  # others have come or gone, and with them buffers of other sizes
            samplers = [generation.sampler(logits.shape[-1]) for generation in self.generations]
            self._sampler = samplers[0] if len(samplers) == 1 else SamplerBatch(samplers)
        masks = [generation.mask for generation in self.generations] if self._guides else []
        sample = self._sampler(logits[:, -1, :], masks if any(masks) else ())
        if TRACE.on:
            TRACE.lap("sample")
        arrays = sample.arrays()
        if len(self.generations) > 1:
            arrays += self._rows.arrays()
        mx.async_eval(arrays)
        if TRACE.on:
            TRACE.lap("dispatch")
        return sample

    def _release(self) -> None:
        if isinstance(self._sampler, SamplerBatch):
            self._sampler.release()
        self._sampler = None


def tell(outbox: Outbox, results: Results) -> list[Generation]:
    """Delivers the events of each generation to its client. Returns the generations that are done."""
    done = []
    for generation, events in results:
        for event in events:
            outbox.put(generation.request.stream, event)
        if generation.done:
            done.append(generation)
    return done
