"""A batch: the generations that decode in one forward.

What is in flight between two steps is one of four, and a step goes on from there:

    None               runs the forward over the recorded tokens, draws, and goes on as `Drawn`; or, with drafts, runs
                       one over the next token of each and drafts, and reads all that are right
                       -> RoundToAccept; with a grammar -> StepAwaitingMasks
    Drawn              runs the forward over these tokens, draws the next ones, and reads these
                       -> Drawn; with a grammar, which has to follow them before it draws -> StepAwaitingMasks
    StepAwaitingMasks  if all masks are there, draws the next tokens; those with late masks are split off
                       -> Drawn; at the end of all answers, or without logits -> None; after a round -> RoundToAccept
    RoundToAccept      takes the layers to the end of what was right, and goes on as None

Two batches join when both are `Drawn`. Generations may leave at any time.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import mlx.core as mx

from runner.cache.layers.batch import staying
from runner.cache.session import DecodeRows
from runner.cpu import asks_for
from runner.engine.events import Event
from runner.engine.generation import Forward, Generation, Results
from runner.engine.policy import StepLimit
from runner.engine.ports import StepTime
from runner.engine.round import Round, RoundDrafts, find_drafts, padded, unseen_at_end
from runner.engine.trace import TRACE
from runner.sampling.sample import Choice, Sample
from runner.sampling.sampler import Sampler, SamplerBatch

if TYPE_CHECKING:
    from runner.engine.ports import Drafter, Shifted

_CLEAR_STEPS = 256  # mlx-lm's caches grow by as many tokens at a time, into new buffers
_PADDING_TOKENS = 256  # a row may always be padded by as many
_GRAMMAR_WAIT_S = 0.05  # a batch waits for a mask; then the answer decodes alone
_GRAMMAR_WAIT_ALONE_S = 0.005  # an answer alone waits; then other slices run
_MEASURED_STEPS = 8  # the time of one in so many steps is recorded if nothing is at hand to draft
_ids = count()
_Logits = TypeVar("_Logits", mx.array, mx.array | None)


class Drawn(NamedTuple):
    """The next token of each answer is drawn and dispatched, and not read yet."""

    sample: Sample
    own: Mapping[Generation, Sample] = {}
    """The part of it that answers drew on their own layers, before they joined."""
    recorded: Sequence[Generation] = ()
    """Answers that joined before they drew: their token in the sample is the last one that they recorded."""


class StepAwaitingMasks(NamedTuple):
    """The tokens of a step are read, and the grammars follow them."""

    choices: list[Choice]
    logits: mx.array | None
    """[B, 1, V], from the forward over these tokens; None if there was none."""
    own: Mapping[Generation, Sample] = {}
    """As in `Drawn`."""
    rounds: Sequence[Round] = ()
    """The round that the tokens are from, if they are from one."""

    def of(self, rows: Sequence[int]) -> "StepAwaitingMasks":
        """Returns these rows of it."""
        logits = None if self.logits is None else self.logits[mx.array([*rows])]
        return self._replace(choices=[self.choices[row] for row in rows], logits=logits)


class RoundToAccept(NamedTuple):
    """The tokens of a round are read; the layers have seen wrong drafts, too."""

    rounds: Sequence[Round]


InFlight: TypeAlias = Drawn | StepAwaitingMasks | RoundToAccept | None


class Batch:
    """One generation, which decodes on its own layers, or several, on copies of their layers.

    If a step of several raises, no generation has taken a token of it: each can go back to what its own layers have
    seen, and decode alone. Owner: the engine thread.
    """

    def __init__(
        self,
        generation: Generation,
        forward: Forward,
        shifted: "Shifted",
        steps: int = 0,
        in_flight: InFlight = None,
    ) -> None:
        """Starts a batch of one generation, which has been prefilled and has made `steps` elsewhere. `shifted` is that
        of the `EngineContext`."""
        # For good.
        self.id = next(_ids)
        self._forward = forward
        self._shifted = shifted
        # Until a generation joins or leaves.
        self.generations = [generation]
        self._rows = DecodeRows(generation.session)
        self._shifts = bool(generation.shift)
        self._guided = generation.grammar.guide is not None
        self._drafters = _drafters(self.generations)
        self._sampler: Sampler | SamplerBatch | None = None  # of steps without drafts; made when it is first needed
        self._vocab_size = 0  # known after the first forward
        self._has_changed = bool(steps)  # generations have joined or left
        # Until the next step.
        self._in_flight = in_flight
        self.steps = steps
        """The number of steps so far."""
        # Of the last step.
        self._measured_at = steps  # the number of the last one whose time was recorded
        self.forward_rows = 0
        """The rows of an answer in its forward, with padding; 0 if there was none, -1 if there were several."""
        self._asked_rows = 0.0  # those that are no padding if that is skipped, on average
        self._lost: Results = []  # late generations that could not be split off
        self.split_off: list[Batch] = []
        """Batches of one, split off because their masks took too long for the others; the reader empties the list."""

    @property
    def nbytes(self) -> int:
        """The bytes held beside the layers of the generations themselves."""
        return self._rows.nbytes

    @property
    def ready(self) -> bool:
        """True if the batch can step; False while a mask is being computed."""
        return not self._guided or all(each.grammar.wait(0.0) for each in self.generations)

    # --- steps

    def step(self, limit: StepLimit | None) -> Sequence[Choice | None]:
        """Returns the next tokens of each generation, for `take`, None for one that joined before it drew; nothing if
        a mask is late: step again when `ready`. The tokens may be several, by a round within the `limit`; None: no
        drafts."""
        if TRACE.on:
            TRACE.name("decode", rows=len(self.generations))
        started_s = monotonic()
        self.forward_rows = 0
        choices: Sequence[Choice | None]
        if isinstance(self._in_flight, StepAwaitingMasks):
            choices = self._step_with_masks()
        else:
            drafts = self._find_drafts(limit)
            if TRACE.on:
                TRACE.lap("drafts")
            if drafts and self._in_flight is None:
                choices = self._step_round(drafts)
            else:
                # The layers of an answer without drafts would end a token earlier, and the cache would keep less of it.
                ahead = self._in_flight is not None or not self._drafters or limit is None or limit.ahead
                choices = self._step_drawn(dispatch=ahead and not drafts)
        if not choices:
            return []
        self.steps += 1
        if self.steps % _CLEAR_STEPS == 0:
            mx.clear_cache()  # the layers have outgrown their buffers, and nothing else is as large as those
        measures = self.steps % _MEASURED_STEPS == 0 or (self._drafters and self._drafters[0].shared.measuring > 0)
        if self._drafters and measures and all(choices):  # a step in which others only joined is no measure
            tokens = sum(len(choice.tokens) for choice in choices if choice)
            length, asked = self.forward_rows, self._asked_rows
            steps, self._measured_at = self.steps - self._measured_at, self.steps
            time = StepTime(monotonic() - started_s, tokens, len(choices), length, asked, steps)
            self._drafters[0].shared.record_time(self._drafters, time)
        return choices

    def _find_drafts(self, limit: StepLimit | None) -> list[RoundDrafts]:
        """Accepts the last round. Returns what to try in this step or, if its tokens are already drawn, in the next."""
        may_draft = self._drafters and self._vocab_size and self._rows.may_draft
        if not self._accept() or limit is None or not may_draft:
            return []
        if all(self.steps % each.every for each in self._drafters):
            return []
        answers = [(each.drafter, each.session) for each in self.generations if each.drafter is not None]
        if not self._drafters[0].shared.look(answers, self.steps):
            return []
        if self._in_flight is None:
            self._release()  # a model that drafts draws as the answers do
        on_its_way = self._in_flight is not None
        return find_drafts(self.generations, self._rows, self._vocab_size, limit, on_its_way=on_its_way)

    def _accept(self, leaving: Sequence[Generation] = ()) -> bool:
        """Ends a round, if there is one. Its right tokens are recorded by now; those of masks that are awaited will be,
        except of generations that are `leaving`. Returns False if they have to be computed again."""
        step = self._in_flight
        if not isinstance(step, RoundToAccept | StepAwaitingMasks) or not step.rounds:
            return True
        awaiting = isinstance(step, StepAwaitingMasks)
        self._in_flight = step._replace(rounds=()) if isinstance(step, StepAwaitingMasks) else None
        rounds = zip(self.generations, step.rounds, strict=True)
        return self._rows.accept(
            [each.right if awaiting and generation not in leaving else each.kept for generation, each in rounds]
        )

    def _step_drawn(self, *, dispatch: bool) -> Sequence[Choice | None]:
        """Reads the tokens that are drawn, if need be now. Before that it may `dispatch` the forward after them."""
        drawn = self._in_flight
        if not isinstance(drawn, Drawn):
            for each in self.generations:
                each.start_decode()
            first = self._run(self._rows.compute, mx.array(self._rows.unseen))
            self._note_first(first, self.generations)
            drawn = Drawn(self._draw(first))
        logits = following = None
        # Not before the first token is read: a CPU computes as it dispatches, and would delay the token by a forward.
        if dispatch and self.steps and any(generation.room > 1 for generation in self.generations):
            logits = self._run(self._rows.compute, drawn.sample.token[:, None])
            if drawn.recorded:
                self._note_first(logits, drawn.recorded)
            if self._guided:
                mx.async_eval([logits, *self._rows.arrays()])
            else:
                following = Drawn(self._draw(logits))
        choices = drawn.sample.read()
        if TRACE.on:
            TRACE.lap("wait")
        if not self._guided:
            self._in_flight = following
            return _without(drawn.recorded, self.generations, choices) if drawn.recorded else choices
        for generation, choice in zip(self.generations, choices, strict=True):
            generation.grammar.follow(choice)
        self._in_flight = StepAwaitingMasks(choices, logits, drawn.own)
        return self._step_with_masks()

    def _step_round(self, drafts: Sequence[RoundDrafts]) -> Sequence[Choice | None]:
        """Draws the next token of each generation, and those after it that were drafted right, by one forward."""
        answers = zip(self.generations, drafts, self._rows.unseen, strict=True)
        rounds = [Round(generation, each, unseen) for generation, each, unseen in answers]
        tokens, counts = padded(rounds), [len(each.tokens) for each in rounds]
        skips = len(rounds) > 1 and self._drafters[0].shared.skips_padding
        with asks_for(counts, tokens.shape[1]) if skips else nullcontext():
            logits = self._run(self._rows.draft, tokens)
        if logits is None:
            return self._step_drawn(dispatch=True)
        if skips:
            self._asked_rows = sum(counts) / len(counts)
        samples = [each.draw(row[: len(each.tokens)]) for each, row in zip(rounds, logits, strict=True)]
        mx.async_eval([array for sample in samples for array in sample.arrays()])
        are_from_numbers = [each.read() for each in rounds]
        if TRACE.on:
            TRACE.lap("wait")
        if not all(are_from_numbers):
            self._rows.take_back(tokens.shape[1])
            return self._step_drawn(dispatch=True)
        choices = [each.choose() for each in rounds]
        if not self._guided:
            self._in_flight = RoundToAccept(rounds)
            return choices
        for generation, choice in zip(self.generations, choices, strict=True):
            generation.grammar.follow(choice)
        self._in_flight = StepAwaitingMasks(choices, None, rounds=rounds)
        return self._step_with_masks()

    def _step_with_masks(self) -> list[Choice]:
        """Waits for the masks, and draws the tokens after those that were read. Returns these, with those that the
        grammar forces after them if there is one answer; none if all masks are late."""
        until_s = monotonic() + (_GRAMMAR_WAIT_S if len(self.generations) > 1 else _GRAMMAR_WAIT_ALONE_S)
        late = [each for each in self.generations if not each.grammar.wait(max(0.0, until_s - monotonic()))]
        TRACE.lap("grammar")
        if late and len(late) == len(self.generations):
            return []
        if late:
            self._split_off(late)
        step = self._in_flight
        assert isinstance(step, StepAwaitingMasks)
        pairs = [*zip(self.generations, step.choices, strict=True)]
        choices = [generation.with_forced(choice, alone=len(pairs) == 1) for generation, choice in pairs]
        if step.rounds:
            self._in_flight = RoundToAccept(step.rounds)
        elif step.logits is None or all(map(Generation.ends_after, self.generations, choices)):
            self._in_flight = None
        else:
            forced = choices[0].forced
            self._in_flight = Drawn(
                self._draw(self._run(self._rows.compute, mx.array([forced])) if forced else step.logits)
            )
        return choices

    def _split_off(self, late: Sequence[Generation]) -> None:
        self._accept()
        everyone, step = self.generations, self._in_flight
        assert isinstance(step, StepAwaitingMasks)
        try:
            self._lost = self.leave(late)
        except Exception:
            self.generations = everyone
            raise
        for generation in late:
            if not generation.done:
                generation.may_batch = False
                row = step.of([everyone.index(generation)])
                self.split_off.append(Batch(generation, self._forward, self._shifted, self.steps, row))

    def take(self, choices: Sequence[Choice | None]) -> Results:
        """Gives each generation its tokens, which `step` returned. Returns the events of each."""
        pairs = zip(self.generations, choices, strict=True)
        lost, self._lost = self._lost, []
        results = lost + [(generation, generation.take(choice)) for generation, choice in pairs if choice]
        if TRACE.on:
            TRACE.lap("text")
        return results

    # --- who is in it

    @property
    def batchable(self) -> bool:
        """True if the layers are of kinds that can be joined, and none of them is untrusted."""
        return self._rows.batchable

    def may_meet(self, other: "Batch") -> bool:
        """Returns True if both stand before their next token, so that one may join the other: it is drawn or, without
        grammars, the last one recorded is the only one that the layers have not seen. Accepts their last rounds."""
        if self._guided or other._guided:
            return all(isinstance(each._in_flight, Drawn) and not each._in_flight.recorded for each in (self, other))
        return self._is_before_token() and other._is_before_token()

    def _is_before_token(self) -> bool:
        if isinstance(self._in_flight, RoundToAccept):
            self._accept()
        if self._in_flight is None:  # without a prompt before the token, layers are empty and of no known shape
            return all(self._rows.lengths) and all(len(tokens) == 1 for tokens in self._rows.unseen)
        return isinstance(self._in_flight, Drawn)

    def _coming(self) -> Drawn:
        """Returns the next token of each generation, drawn or recorded."""
        if isinstance(self._in_flight, Drawn):
            return self._in_flight
        tokens = mx.array(self._rows.unseen, mx.uint32)[:, 0]
        return Drawn(Sample(tokens), recorded=self.generations)

    @property
    def lengths(self) -> Sequence[int]:
        """The tokens of each row."""
        return self._rows.lengths

    def accepts(self, lengths: Sequence[int]) -> bool:
        """Returns True if generations whose rows have these lengths may join. Rows are padded to the longest: a much
        shorter row would cost more in padding than in forwards of its own."""
        rows = [*self.lengths, *lengths]
        fits = max(rows) * len(rows) <= 2 * sum(rows) + _PADDING_TOKENS * len(rows)
        return fits and all(each.may_batch for each in self.generations)

    def make_room(self, lengths: Sequence[int]) -> bool:
        """Makes room for rows of these lengths, which are to join, and for the next tokens of all: a piece of it, as
        all rows are copied. Returns True if there is all of it. If this raises, several generations can only decode one
        by one, after `break_up`."""
        return self._rows.make_room(len(lengths), max(lengths, default=0))

    def join(self, others: Sequence["Batch"]) -> None:
        """Takes over the generations of `others`, which this batch `accepts`, and each of which it `may_meet`. If this
        raises, `others` are unchanged, and so is this batch if it had one generation."""
        batches = [self, *others]
        coming = [each._coming() for each in batches]
        sample = Sample.joined([each.sample for each in coming])
        for batch in batches:
            batch._release()
        rows = DecodeRows(self.generations[0].session) if len(self.generations) == 1 else self._rows
        rows.join([each._rows for each in others])
        self._rows = rows
        own = {**coming[0].own}
        for batch, drawn in zip(batches, coming, strict=True):
            if len(batch.generations) == 1 and not drawn.recorded:
                own[batch.generations[0]] = drawn.sample
        self.generations = [each for batch in batches for each in batch.generations]
        recorded = [generation for each in coming for generation in each.recorded]
        for generation in recorded:
            generation.start_decode()
        self._in_flight = Drawn(sample, own, recorded) if len(recorded) < len(self.generations) else None
        self._has_changed = True
        self._shifts = any(each._shifts for each in batches)
        self._guided = any(each._guided for each in batches)
        self._drafters = _drafters(self.generations)

    def leave(self, leaving: Sequence[Generation]) -> Results:
        """Removes these generations; their own layers take over what the batch has computed. Returns the generations
        for which that failed. If this raises, the remaining ones can only decode one by one, after `break_up`."""
        rows = self.generations
        self._accept(leaving)
        stay = staying(len(rows), {row for row, generation in enumerate(rows) if generation in leaving})
        self.generations = [rows[row] for row in stay]
        self._guided = any(each.grammar.guide is not None for each in self.generations)
        self._drafters = _drafters(self.generations)
        self._has_changed = True
        self._release()
        if stay and isinstance(self._in_flight, Drawn):
            self._in_flight = self._in_flight._replace(sample=self._in_flight.sample.take(stay))
        elif stay and isinstance(self._in_flight, StepAwaitingMasks):
            self._in_flight = self._in_flight.of(stay)
        failed: Results = []
        for row, generation in enumerate(rows):
            if row not in stay:
                try:
                    self._rows.settle(row)
                    if generation.drafter is not None and self.steps > 1:
                        self._see_end(generation)
                except Exception as error:
                    failed.append((generation, generation.fail(error)))
        self._rows.keep(stay)  # last: layers that have settled have seen the token that they would go back to
        return failed

    def _see_end(self, generation: Generation) -> None:
        """Lets the own layers of an answer see what they would have seen by its end without rounds."""
        if unseen := unseen_at_end(generation):
            with self._shifted([generation.shift]):
                DecodeRows(generation.session).compute(self._forward, mx.array([unseen]))

    def break_up(self, error: Exception) -> Results:
        """Breaks up the batch after this error: each generation goes back to what its own layers have seen, and takes
        the token that it drew on them, if it has not. One whose own layers are lost has failed."""
        own = self._in_flight.own if isinstance(self._in_flight, Drawn | StepAwaitingMasks) else {}
        return self._lost + [(each, _fall_back(each, own.get(each), error)) for each in self.generations]

    # --- on the device

    def _run(self, compute: Callable[[Forward, mx.array], _Logits], tokens: mx.array) -> _Logits:
        """Runs the forward over tokens [B, L] by a method of the rows. Returns what that does."""
        self.forward_rows = -1 if self.forward_rows else tokens.shape[1]
        self._asked_rows = self.forward_rows
        with self._shifted([each.shift for each in self.generations]) if self._shifts else nullcontext():
            logits = compute(self._forward, tokens)
        if TRACE.on:
            TRACE.lap("forward")
        return logits

    def _draw(self, logits: mx.array) -> Sample:
        """Samples the next token of each generation and dispatches it, with the forward before it."""
        if self._has_changed:
            self._has_changed = False
            mx.clear_cache()  # buffers of other sizes have come or left with generations
        self._vocab_size = logits.shape[-1]
        if self._sampler is None:
            samplers = [generation.sampler(self._vocab_size) for generation in self.generations]
            self._sampler = samplers[0] if len(samplers) == 1 else SamplerBatch(samplers)
        masks = [generation.grammar.mask for generation in self.generations] if self._guided else []
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

    def _note_first(self, logits: mx.array, new: Sequence[Generation]) -> None:
        """Gives these generations the logits after their prompts, if nothing of their answers is there yet."""
        for generation in new:
            if generation.keep_logits and len(generation.session.recorded) == generation.session.total:
                row = self.generations.index(generation)
                generation.first_logits = mx.contiguous(logits[row : row + 1, -1])

    def _release(self) -> None:
        """Gives the samplers of a batch their states back."""
        if isinstance(self._sampler, SamplerBatch):
            self._sampler.release()
        self._sampler = None


def _without(
    recorded: Sequence[Generation], generations: Sequence[Generation], choices: Sequence[Choice]
) -> Sequence[Choice | None]:
    rows = zip(generations, choices, strict=True)
    return [None if generation in recorded else choice for generation, choice in rows]


def _drafters(generations: Sequence[Generation]) -> list["Drafter"]:
    return [each.drafter for each in generations if each.drafter is not None]


def _fall_back(generation: Generation, own: Sample | None, error: Exception) -> list[Event]:
    """Lets an answer go back to what its own layers have seen, to go on alone; it fails if these are lost.

    It takes the token that it drew on them, if it has not: `own`. Returns the events for the client.
    """
    # Without a token to take, its layers must not have seen the token that it would go back to.
    seen_all = own is None and generation.session.position >= len(generation.session.recorded)
    if generation.session.failed or seen_all:
        return generation.fail(error)
    events: list[Event] = []
    try:
        if own:
            generation.restart_grammar()
            generation.grammar.follow(choice := own.read()[0])
            if generation.grammar.wait(_GRAMMAR_WAIT_S):
                events += generation.take(generation.with_forced(choice, alone=False))
            else:
                events += generation.abort("its grammar takes too long to be followed again")
        if not generation.done:
            generation.return_to_prefill()
    except Exception as fault:
        generation.note_forward(fault)
        events += generation.fail(fault)
    return events
