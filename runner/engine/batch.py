"""A batch: the generations that decode in one forward."""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from runner.cache.session import DecodeRows
from runner.engine.events import Event, Outbox
from runner.engine.generation import Forward, Generation, Results
from runner.engine.round import Round, RoundDrafts, find_drafts, unseen_at_end
from runner.engine.trace import TRACE
from runner.sampling.sample import Choice, Sample
from runner.sampling.sampler import Sampler, SamplerBatch

if TYPE_CHECKING:
    from runner.engine.guide import Guide
    from runner.engine.ports import Shifted

# --- The way of an answer out of a batch that has failed.


def fall_back(generation: Generation, own: Sample | None, error: Exception, patience_s: float) -> list[Event]:
    """Lets an answer go back to what its own layers have seen, to go on alone; it fails if these are lost.

    It takes the token that it drew on them, if it has not: `own`. It waits `patience_s` for its grammar. Returns the
    events for the client.
    """
    # Without a token to take, its layers must not have seen the token that it would go back to.
    seen_all = own is None and generation.session.position >= len(generation.session.recorded)
    if generation.session.failed or seen_all:
        return generation.fail(error)
    events: list[Event] = []
    try:
        if own:
            generation.restart_grammar()
            generation.grammar.advance(choice := own.read()[0])
            if generation.grammar.wait(patience_s):
                events += generation.take(generation.with_forced(choice, alone=False))
            else:
                events += generation.abort("its grammar takes too long to be followed again")
        if not generation.done:
            generation.return_to_prefill()
    except Exception as fault:
        events += generation.fail(fault)
    return events


# --- A decode step that waits for masks.


class PausedStep(NamedTuple):
    """A step whose tokens are read, while the grammars advance along them."""

    choices: list[Choice]
    logits: mx.array | None
    """[B, 1, V], from the forward over these tokens; None if there was none."""

    def of(self, rows: Sequence[int]) -> "PausedStep":
        """Returns these rows of it."""
        logits = None if self.logits is None else self.logits[mx.array([*rows])]
        return PausedStep([self.choices[row] for row in rows], logits)


_CLEAR_STEPS = 256  # mlx-lm's caches grow by as many tokens at a time, into new buffers
_PADDING_TOKENS = 256  # a row may always be padded by so many
_GRAMMAR_WAIT_S = 0.05  # a batch waits so long for a mask; then the answer decodes alone
_GRAMMAR_WAIT_ALONE_S = 0.005  # an answer alone waits so long; then other slices run
_ids = count()


class Batch:
    """One generation, which decodes on its own layers, or several, on copies of their layers.

    From the second step on, the forward for the next token is dispatched before the present token is read. If a step of
    several raises, no generation has taken a token of it: each can go back to what its own layers have seen and decode
    alone. Owner: the engine thread.
    """

    def __init__(self, generation: Generation, forward: Forward, shifted: "Shifted") -> None:
        """Starts a batch of one generation, which has been prefilled. `shifted` is that of the `EngineContext`."""
        self.id = next(_ids)
        self.generations = [generation]
        self._forward = forward
        self._rows = DecodeRows(generation.session)
        self._shifted = shifted
        self._shifts = bool(generation.shift)
        self._sampler: Sampler | SamplerBatch | None = None
        self._ahead: Sample | None = None  # dispatched and not yet read
        self._drawn_alone: dict[Generation, Sample] = {}  # drawn on own layers, and not taken yet
        self._paused: PausedStep | None = None
        self._round: Round | None = None  # drawn and not accepted yet
        self._started_s = 0.0  # the present step
        self.forward_rows = 0
        """The rows of an answer in the forward of the last step; 0 if there was none, -1 if there were several."""
        self.may_draft = False
        """True if there is a drafter, and no other answer decodes."""
        self._unreported: Results = []
        self.split_off: list[Batch] = []
        """Batches of one, split off because their grammars took too long for the others; whoever reads the list empties
        it."""
        self.steps = 0
        """The number of steps so far."""

    @property
    def _guides(self) -> "list[Guide]":
        """The guides of the answers that follow a grammar."""
        return [each.grammar.guide for each in self.generations if each.grammar.guide is not None]

    @property
    def nbytes(self) -> int:
        """The bytes held beside the layers of the generations themselves."""
        return self._rows.nbytes

    @property
    def ready(self) -> bool:
        """True if the batch can step; False while a mask is being computed."""
        guides = self._guides
        return not guides or all(guide.wait(0.0) for guide in guides)

    def step(self) -> list[Choice]:
        """Returns the next token of each generation, for `take`; none if a mask is late: step again when `ready`."""
        if TRACE.on:
            TRACE.name("decode", rows=len(self.generations))
        self._started_s, self.forward_rows = monotonic(), 0
        guided = bool(self._guides)
        self._paused = paused = self._paused or self._advance(guided)
        if guided:
            if not self._wait_for_grammars():
                return []
            # _wait_for_grammars may have removed rows.
            paused = self._paused._replace(choices=self._with_forced(self._paused.choices))
            if paused.logits is not None and self._ahead is None:
                self._ahead = self._draw_after(paused.logits, paused.choices)
        self._paused = None
        self._drawn_alone.clear()
        self.steps += 1
        if self.steps % _CLEAR_STEPS == 0:
            mx.clear_cache()  # the layers have outgrown their buffers, and nothing else is as large as those
        if len(paused.choices) == 1 and (drafter := self.generations[0].drafter) is not None:
            drafter.record_time(len(paused.choices[0].tokens), self.forward_rows, monotonic() - self._started_s)
        return paused.choices

    def _advance(self, guided: bool) -> PausedStep:
        """Reads the next token of each generation. Before that it dispatches the forward after them; after it, the
        grammars advance."""
        drafts = RoundDrafts()
        if (self._round is None or self._accept()) and self.may_draft and isinstance(self._sampler, Sampler):
            drafts = find_drafts(self.generations[0], self._sampler.vocab_size, on_its_way=self._ahead is not None)
        if drafts.tokens and self._ahead is None:
            self._round = Round(self.generations[0], drafts)
            choice = self._round.draw(self._run(self._round.tokens, drafted=True))
            self.generations[0].grammar.advance(choice)
            return PausedStep([choice], None)
        current = self._ahead or self._draw(
            self._run(mx.array([generation.start_decode() for generation in self.generations]))
        )
        self._ahead = logits = None
        # Not before the first token is read: a CPU computes as it dispatches, and would delay the token by a forward.
        # Nor before a round, which begins with this token.
        if self.steps and not drafts.tokens and any(generation.room > 1 for generation in self.generations):
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
                generation.grammar.advance(choice)
        return PausedStep(choices, logits)

    def _accept(self) -> bool:
        """Ends a round, if there is one: the tokens that were right are recorded by now. Returns False if they have to
        be computed again."""
        tried, self._round = self._round, None
        return tried is None or tried.accept()

    def _wait_for_grammars(self) -> bool:
        """Waits for the masks, and splits off the generations whose masks take too long for the others. Returns True if
        all masks are there."""
        until_s = monotonic() + (_GRAMMAR_WAIT_S if len(self.generations) > 1 else _GRAMMAR_WAIT_ALONE_S)
        late = [each for each in self.generations if not each.grammar.wait(max(0.0, until_s - monotonic()))]
        TRACE.lap("grammar")
        if not late or len(late) == len(self.generations):
            return not late
        everyone, paused = self.generations, self._paused
        assert paused is not None
        try:
            self._unreported += self.leave(late)
        except Exception:
            self.generations = everyone
            raise
        for generation in late:
            if not generation.done:
                generation.may_batch = False
                alone = Batch(generation, self._forward, self._shifted)
                alone.steps = self.steps
                alone._paused = paused.of([everyone.index(generation)])
                self.split_off.append(alone)
        return True

    def take(self, choices: Sequence[Choice]) -> Results:
        """Gives each generation its token, which `step` returned. Returns the events of each."""
        pairs = zip(self.generations, choices, strict=True)
        lost, self._unreported = self._unreported, []
        results = lost + [(generation, generation.take(choice)) for generation, choice in pairs]
        if TRACE.on:
            TRACE.lap("text")
        return results

    def accepts(self, other: "Batch") -> bool:
        """Returns True if the generation of `other`, which has one, may join. Rows are padded to the longest: a much
        shorter row would cost more in padding than in forwards of its own."""
        if self._ahead is None or other._ahead is None or len(other.generations) > 1:
            return False
        if not all(generation.may_batch for generation in (*self.generations, *other.generations)):
            return False
        lengths = [*self._rows.lengths, *other._rows.lengths]
        return max(lengths) * len(lengths) <= 2 * sum(lengths) + _PADDING_TOKENS * len(lengths)

    @property
    def batchable(self) -> bool:
        """True if the layers are of kinds that can be joined, and none of them is untrusted."""
        return self._rows.batchable

    def padded(self, other: "Batch") -> int:
        """Returns the tokens of the longest row of both batches."""
        return max(*self._rows.lengths, *other._rows.lengths)

    def join(self, other: "Batch") -> None:
        """Takes over the generation of `other`, which has one, between two steps. If this raises, `other` is unchanged,
        and so is this batch if it had one generation."""
        assert self._ahead is not None
        assert other._ahead is not None
        ahead = Sample.joined([self._ahead, other._ahead])
        self._release()
        other._release()
        rows = self._rows if len(self.generations) > 1 else DecodeRows(self.generations[0].session)
        rows.join(other._rows)
        self._rows = rows
        if len(self.generations) == 1:
            self._drawn_alone[self.generations[0]] = self._ahead
        self._drawn_alone[other.generations[0]] = other._ahead
        self._ahead = ahead
        self.generations += other.generations
        self._shifts |= other._shifts

    def leave(self, leaving: Sequence[Generation]) -> Results:
        """Removes these generations; their own layers take over what the batch has computed. Returns the generations
        for which that failed. If this raises, the remaining ones can only decode one by one, after `break_up`."""
        rows = self.generations
        self._accept()
        if len(rows) == 1 and rows[0].drafter is not None and self.steps > 1 and (unseen := unseen_at_end(rows[0])):
            self._run(mx.array([unseen]))
        staying = [row for row, generation in enumerate(rows) if generation not in leaving]
        self.generations = [rows[row] for row in staying]
        self._release()
        if self._ahead is not None and staying:
            self._ahead = self._ahead.take(staying)
        if self._paused is not None and staying:
            self._paused = self._paused.of(staying)
        failed: Results = []
        for row, generation in enumerate(rows):
            if row not in staying:
                try:
                    self._rows.settle(row)
                except Exception as error:
                    failed.append((generation, generation.fail(error)))
        self._rows.keep(staying)  # last: layers that have settled have seen the token that they would go back to
        return failed

    def break_up(self, error: Exception) -> Results:
        """Breaks up the batch after this error: each generation goes back to what its own layers have seen, and takes
        the token that it drew on them, if it has not. One whose own layers are lost has failed."""
        results, self._unreported = self._unreported, []
        drawn = self._drawn_alone
        return results + [(each, fall_back(each, drawn.get(each), error, _GRAMMAR_WAIT_S)) for each in self.generations]

    def _with_forced(self, choices: Sequence[Choice]) -> list[Choice]:
        """Returns each choice with the tokens that its grammar forces after it: none if there are several answers."""
        alone = len(choices) == 1
        pairs = zip(self.generations, choices, strict=True)
        return [generation.with_forced(choice, alone=alone) for generation, choice in pairs]

    def _draw_after(self, logits: mx.array, choices: Sequence[Choice]) -> Sample | None:
        """Draws the tokens after these, over which the forward is dispatched; None if all answers end with them."""
        pairs = [*zip(self.generations, choices, strict=True)]
        if all(generation.ends_after(choice) for generation, choice in pairs):
            return None
        if choices[0].forced:
            logits = self._run(mx.array([choices[0].forced]))
        return self._draw(logits)

    def _run(self, tokens: mx.array, *, drafted: bool = False) -> mx.array:
        """Runs the forward over tokens [B, L]; L is 1 for several generations. Returns the logits [B, L, V] (lazy)."""
        self.forward_rows = -1 if self.forward_rows else tokens.shape[1]
        with self._shifted([each.shift for each in self.generations]) if self._shifts else nullcontext():
            logits = self._rows.compute(self._forward, tokens, drafted=drafted)
        if TRACE.on:
            TRACE.lap("forward")
        return logits

    def _draw(self, logits: mx.array) -> Sample:
        """Samples the next token of each generation and dispatches it, with the forward before it."""
        if self._sampler is None:
            if self.steps:
                mx.clear_cache()  # generations have joined or left, and buffers of other sizes with them
            samplers = [generation.sampler(logits.shape[-1]) for generation in self.generations]
            self._sampler = samplers[0] if len(samplers) == 1 else SamplerBatch(samplers)
        masks = [generation.grammar.mask for generation in self.generations] if self._guides else []
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
        """Gives the samplers of a batch their states back."""
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
