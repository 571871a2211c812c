"""A batch: the generations that decode in one forward.

Between two steps, `Batch.in_flight` has one of three values. Each step begins with that value and leaves the next one:

    None               runs the forward over the recorded tokens, draws the next tokens, and continues as for `Drawn`.
                       With drafts: runs a round, and reads the tokens that the round accepts
                       -> None; with a grammar -> StepAwaitingMasks
    Drawn              runs the forward over the drawn tokens, draws the next tokens, and reads the drawn tokens
                       -> Drawn; with a grammar, which follows tokens before the next draw -> StepAwaitingMasks
    StepAwaitingMasks  draws the next tokens, when the masks are known; answers with late masks are split off
                       -> Drawn; if all answers end, after a round, or without logits -> None

Two batches join when each has its next token (`Batch.may_meet`). Generations may leave at any time.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import count
from time import monotonic
from typing import NamedTuple, TypeAlias, TypeVar

import mlx.core as mx

from runner.cache.layers.batched import staying
from runner.cache.session import DecodeRows
from runner.engine.core import CoreParts
from runner.engine.generation import Forward, Generation, Results
from runner.engine.policy import StepLimit
from runner.sampling.sample import Choice, SampledTokens
from runner.sampling.sampler import Sampler, SamplerBatch
from runner.trace import TRACE

_CLEAR_STEPS = 256  # mlx-lm's caches grow by this many tokens at a time, into new buffers
_PADDING_TOKENS = 256  # a row may always be padded by this many tokens
GRAMMAR_WAIT_S = 0.05  # the longest wait of a batch for a mask; then the answer decodes alone
_GRAMMAR_WAIT_ALONE_S = 0.005  # the longest wait of a lone answer for its mask; then other slices run
_ids = count()
_Logits = TypeVar("_Logits", mx.array, mx.array | None)


class Drawn(NamedTuple):
    """The state in which the next token of each answer is drawn and dispatched, but not yet read."""

    sample: SampledTokens
    own: Mapping[Generation, SampledTokens] = {}
    """The tokens of the sample that answers drew on their own layers, before they joined the batch."""
    recorded: Sequence[Generation] = ()
    """The answers that joined before they drew. For such an answer, `sample` holds the last token that it recorded."""


class StepAwaitingMasks(NamedTuple):
    """The state in which the tokens of a step are read, and the grammars follow these tokens."""

    choices: Sequence[Choice]
    logits: mx.array | None = None
    """Logits [B, 1, V] from the forward over these tokens. None if that forward has not run."""
    own: Mapping[Generation, SampledTokens] = {}
    """The tokens that answers drew on their own layers, as in `Drawn`."""

    def of(self, rows: Sequence[int]) -> "StepAwaitingMasks":
        """Returns this state for the given rows only."""
        logits = None if self.logits is None else self.logits[mx.array([*rows])]
        return self._replace(choices=[self.choices[row] for row in rows], logits=logits)


InFlight: TypeAlias = Drawn | StepAwaitingMasks | None


class Batch:
    """One generation, which decodes on its own layers, or several generations, which decode on copies of their layers.

    If a step of several generations raises, none of them has taken a token of that step. Each can return to the state
    of its own layers and decode alone. Owner: the engine thread.
    """

    def __init__(self, generation: Generation, parts: CoreParts, steps: int = 0, in_flight: InFlight = None) -> None:
        """Starts a batch of one prefilled generation, which has already made `steps` steps in another batch."""
        # Set for the life of the batch.
        self.id = next(_ids)
        self._parts = parts
        self._forward = parts.memory.measured(parts.forward_of(generation.request))
        # Valid until a generation joins or leaves.
        self.generations = [generation]
        self.rows = DecodeRows(generation.session)
        """The layers of the generations."""
        self._shifts = bool(generation.shift)
        self._guided = generation.grammar.guide is not None
        self._sampler: Sampler | SamplerBatch | None = None  # of steps without drafts; made when first needed
        self.vocab_size = 0
        """The number of tokens in the vocabulary; 0 before the first forward."""
        self._has_changed = bool(steps)  # True once generations have joined or left
        # Valid until the next step.
        self.in_flight = in_flight
        """The state with which the next step begins."""
        self.steps = steps
        """The number of steps that the answers have made so far."""
        # Set by the last step.
        self.forward_rows = 0
        """The rows of each answer in the last step's forward, with padding; 0 without a forward, -1 after several."""
        self.latest_rows = 0
        """The `forward_rows` of the latest step that had a forward."""
        self.lost: Results = []
        """Generations with late masks that could not be split off, each with the events for its client."""
        self.split_off: list[Batch] = []
        """Batches of one generation, split off because its mask was late. `Batches.add_split_off` empties this list."""
        self._rounds = parts.rounds(self) if parts.rounds is not None else None

    @property
    def nbytes(self) -> int:
        """The bytes that the batch holds beside the generations' own layers."""
        return self.rows.nbytes

    @property
    def ready(self) -> bool:
        """True if the batch can step; False while a grammar's mask is being computed."""
        return not self._guided or all(each.grammar.wait(0.0) for each in self.generations)

    # --- steps

    def step(self, limit: StepLimit | None) -> Sequence[Choice | None]:
        """Computes a step. Returns the next tokens of each generation, for `hand_out`; None for a generation that
        joined before it drew. Returns an empty list if all masks are late: then step again when `ready`. A round within
        `limit` may yield several tokens; a `limit` of None forbids drafts."""
        if TRACE.on:
            TRACE.name("decode", rows=len(self.generations))
        started_s = monotonic()
        self.forward_rows = 0
        choices: Sequence[Choice | None]
        rounds = self._rounds
        if isinstance(self.in_flight, StepAwaitingMasks):
            choices = self._step_with_masks()
        elif rounds is not None and (drawn := rounds.try_step(limit)) is not None:
            choices = self._follow(StepAwaitingMasks(drawn)) if self._guided else drawn
        else:
            choices = self._step_drawn(dispatch=rounds is None or rounds.ahead)
        if not choices:
            return []
        self.steps += 1
        if self.steps % _CLEAR_STEPS == 0:
            mx.clear_cache()  # frees the large buffers that the layers have outgrown
        # The time of a step in which other answers joined says nothing about drafts.
        if rounds is not None and rounds.measures() and all(choices):
            rounds.record_time(monotonic() - started_s, sum(len(choice.tokens) for choice in choices if choice))
        return choices

    def _step_drawn(self, *, dispatch: bool) -> Sequence[Choice | None]:
        """Reads the drawn tokens; draws them first if none are drawn. With `dispatch`, the next forward may be
        dispatched before the tokens are read."""
        drawn = self.in_flight
        if not isinstance(drawn, Drawn):
            for each in self.generations:
                each.start_decode()
            first = self.run(self.rows.compute, mx.array(self.rows.unseen))
            self._note_first(first, self.generations)
            drawn = Drawn(self._draw(first))
        logits = following = None
        # Only after the first token is read: a CPU computes while it dispatches, which would delay that token.
        if dispatch and self.steps and any(generation.room > 1 for generation in self.generations):
            logits = self.run(self.rows.compute, drawn.sample.token[:, None])
            if drawn.recorded:
                self._note_first(logits, drawn.recorded)
            if self._guided:
                mx.async_eval([logits, *self.rows.arrays()])
            else:
                following = Drawn(self._draw(logits))
        choices = drawn.sample.read()
        if TRACE.on:
            TRACE.lap("wait")
        if not self._guided:
            self.in_flight = following
            return _without(drawn.recorded, self.generations, choices) if drawn.recorded else choices
        return self._follow(StepAwaitingMasks(choices, logits, drawn.own))

    def _follow(self, step: StepAwaitingMasks) -> list[Choice]:
        """Makes the grammars follow the tokens of a step. Returns the result of `_step_with_masks`."""
        for generation, choice in zip(self.generations, step.choices, strict=True):
            generation.grammar.follow(choice)
        self.in_flight = step
        return self._step_with_masks()

    def _step_with_masks(self) -> list[Choice]:
        """Waits for the masks, and draws the next tokens. Returns the tokens that were read, and after them the tokens
        that the grammar of a lone answer forces. Returns an empty list if all masks are late."""
        until_s = monotonic() + (GRAMMAR_WAIT_S if len(self.generations) > 1 else _GRAMMAR_WAIT_ALONE_S)
        late = [each for each in self.generations if not each.grammar.wait(max(0.0, until_s - monotonic()))]
        TRACE.lap("grammar")
        if late and len(late) == len(self.generations):
            return []
        if late:
            self._split_off(late)
        step = self.in_flight
        assert isinstance(step, StepAwaitingMasks)
        pairs = [*zip(self.generations, step.choices, strict=True)]
        choices = [generation.with_forced(choice, alone=len(pairs) == 1) for generation, choice in pairs]
        if step.logits is None or all(map(Generation.ends_after, self.generations, choices)):
            self.in_flight = None
        else:
            forced = choices[0].forced
            self.in_flight = Drawn(
                self._draw(self.run(self.rows.compute, mx.array([forced])) if forced else step.logits)
            )
        return choices

    def _split_off(self, late: Sequence[Generation]) -> None:
        if self._rounds is not None:
            self._rounds.accept(awaiting=True)
        everyone, step = self.generations, self.in_flight
        assert isinstance(step, StepAwaitingMasks)
        try:
            self.lost = self.leave(late)
        except Exception:
            self.generations = everyone
            raise
        for generation in late:
            if not generation.done:
                generation.may_batch = False
                row = step.of([everyone.index(generation)])
                self.split_off.append(Batch(generation, self._parts, self.steps, row))

    def hand_out(self, choices: Sequence[Choice | None]) -> Results:
        """Gives each generation the tokens that `step` returned for it. Returns the events for each client."""
        pairs = zip(self.generations, choices, strict=True)
        lost, self.lost = self.lost, []
        results = lost + [(generation, generation.take(choice)) for generation, choice in pairs if choice]
        if TRACE.on:
            TRACE.lap("text")
        return results

    # --- generations join and leave

    @property
    def batchable(self) -> bool:
        """True if all layers are of kinds that can be joined, and no layer is untrusted."""
        return self.rows.batchable

    def may_meet(self, other: "Batch") -> bool:
        """Returns True if one batch may join the other: each has its next tokens ready. With a grammar, these tokens
        must be drawn. Without grammars, they may also be recorded, each as the only token that the layers have not
        seen. Accepts the last rounds of both batches."""
        if self._guided or other._guided:
            return all(isinstance(each.in_flight, Drawn) and not each.in_flight.recorded for each in (self, other))
        return self._is_before_token() and other._is_before_token()

    def _is_before_token(self) -> bool:
        if self.in_flight is None and self._rounds is not None:
            self._rounds.accept()
        if self.in_flight is None:  # after a prompt of one token, layers are empty and have no shape yet
            return all(self.rows.lengths) and all(len(tokens) == 1 for tokens in self.rows.unseen)
        return isinstance(self.in_flight, Drawn)

    def _coming(self) -> Drawn:
        """Returns the next token of each generation, as drawn or as recorded."""
        if isinstance(self.in_flight, Drawn):
            return self.in_flight
        tokens = mx.array(self.rows.unseen, mx.uint32)[:, 0]
        return Drawn(SampledTokens(tokens), recorded=self.generations)

    @property
    def lengths(self) -> Sequence[int]:
        """The number of tokens in each row."""
        return self.rows.lengths

    def accepts(self, lengths: Sequence[int]) -> bool:
        """Returns True if generations with rows of these lengths may join. All rows are padded to the longest one, so a
        much shorter row would cost more in padding than forwards of its own cost."""
        rows = [*self.lengths, *lengths]
        fits = max(rows) * len(rows) <= 2 * sum(rows) + _PADDING_TOKENS * len(rows)
        return fits and all(each.may_batch for each in self.generations)

    def make_room(self, lengths: Sequence[int]) -> bool:
        """Makes a piece of the room for joining rows of these lengths and for the next tokens of all rows. All rows are
        copied, so one call makes one piece only. Returns True if all of the room is made. If this raises, the batch
        must be broken up (`Recovery.break_up`), unless it has one generation."""
        return self.rows.make_room(len(lengths), max(lengths, default=0))

    def join(self, others: Sequence["Batch"]) -> None:
        """Takes over the generations of `others`. For each, `accepts` and `may_meet` must have returned True. If this
        raises, `others` are unchanged; this batch is unchanged too if it had one generation."""
        batches = [self, *others]
        coming = [each._coming() for each in batches]
        sample = SampledTokens.joined([each.sample for each in coming])
        for batch in batches:
            batch.release_samplers()
        rows = DecodeRows(self.generations[0].session) if len(self.generations) == 1 else self.rows
        rows.join([each.rows for each in others])
        self.rows = rows
        own = {**coming[0].own}
        for batch, drawn in zip(batches, coming, strict=True):
            if len(batch.generations) == 1 and not drawn.recorded:
                own[batch.generations[0]] = drawn.sample
        self.generations = [each for batch in batches for each in batch.generations]
        recorded = [generation for each in coming for generation in each.recorded]
        for generation in recorded:
            generation.start_decode()
        self.in_flight = Drawn(sample, own, recorded) if len(recorded) < len(self.generations) else None
        self._has_changed = True
        self._shifts = any(each._shifts for each in batches)
        if self._shifts:  # compiled steps take positions from the layers alone
            self._forward = self._parts.memory.measured(self._parts.forward)
        self._guided = any(each._guided for each in batches)

    def leave(self, leaving: Sequence[Generation]) -> Results:
        """Removes the `leaving` generations; their own layers take over the results of the batch. Returns the
        generations that failed in this. If this raises, the remaining ones must be broken up (`Recovery.break_up`)."""
        rows = self.generations
        gone = {row for row, generation in enumerate(rows) if generation in leaving}
        if self._rounds is not None:
            self._rounds.accept(gone, awaiting=isinstance(self.in_flight, StepAwaitingMasks))
        stay = staying(len(rows), gone)
        self.generations = [rows[row] for row in stay]
        self._guided = any(each.grammar.guide is not None for each in self.generations)
        self._has_changed = True
        self.release_samplers()
        if stay and isinstance(self.in_flight, Drawn):
            self.in_flight = self.in_flight._replace(sample=self.in_flight.sample.take(stay))
        elif stay and isinstance(self.in_flight, StepAwaitingMasks):
            self.in_flight = self.in_flight.of(stay)
        failed: Results = []
        for row, generation in enumerate(rows):
            if row not in stay:
                try:
                    self.rows.settle(row)
                    if generation.drafter is not None and self.steps > 1:
                        self._see_end(generation)
                except Exception as error:
                    failed.append((generation, generation.fail(error)))
        self.rows.keep(stay)  # last: settled layers have seen the token to which they would return
        return failed

    def _see_end(self, generation: Generation) -> None:
        """Computes, on the answer's own layers, the tokens that they would have seen in steps without rounds."""
        session = generation.session
        last = generation.unseen if generation.has_ended else 1  # the next forward begins with the last token
        if unseen := session.recorded[session.position : len(session.recorded) - last]:
            with self._parts.shifted([generation.shift]):
                DecodeRows(generation.session).compute(self._forward, mx.array([unseen]))

    @property
    def own(self) -> Mapping[Generation, SampledTokens]:
        """The tokens that answers drew on their own layers and have not yet taken."""
        return self.in_flight.own if isinstance(self.in_flight, Drawn | StepAwaitingMasks) else {}

    # --- forwards and samples

    def run(self, compute: Callable[[Forward, mx.array], _Logits], tokens: mx.array) -> _Logits:
        """Runs the forward over `tokens` [B, L] through `compute`, a method of the rows. Returns its result."""
        self.forward_rows = self.latest_rows = -1 if self.forward_rows else tokens.shape[1]
        with self._parts.shifted([each.shift for each in self.generations]) if self._shifts else nullcontext():
            logits = compute(self._forward, tokens)
        if TRACE.on:
            TRACE.lap("forward")
        return logits

    def _draw(self, logits: mx.array) -> SampledTokens:
        """Samples the next token of each generation. Dispatches the samples together with the forward before them."""
        if self._has_changed:
            self._has_changed = False
            mx.clear_cache()  # the number of rows has changed, so buffers need other sizes
        self.vocab_size = logits.shape[-1]
        if self._sampler is None:
            samplers = [generation.sampler(self.vocab_size) for generation in self.generations]
            self._sampler = samplers[0] if len(samplers) == 1 else SamplerBatch(samplers)
        masks = [generation.grammar.mask for generation in self.generations] if self._guided else []
        sample = self._sampler(logits[:, -1, :], masks if any(masks) else ())
        if TRACE.on:
            TRACE.lap("sample")
        arrays = sample.arrays()
        if len(self.generations) > 1:
            arrays += self.rows.arrays()
        mx.async_eval(arrays)
        if TRACE.on:
            TRACE.lap("dispatch")
        return sample

    def _note_first(self, logits: mx.array, new: Sequence[Generation]) -> None:
        """Gives each of the generations `new` the logits after its prompt, unless its answer has begun."""
        for generation in new:
            if generation.keep_logits and len(generation.session.recorded) == generation.session.total:
                row = self.generations.index(generation)
                generation.first_logits = mx.contiguous(logits[row : row + 1, -1])

    def release_samplers(self) -> None:
        """If the batch has several generations, gives each one's sampler its state back."""
        if isinstance(self._sampler, SamplerBatch):
            self._sampler.release()
        self._sampler = None


def _without(
    recorded: Sequence[Generation], generations: Sequence[Generation], choices: Sequence[Choice]
) -> Sequence[Choice | None]:
    rows = zip(generations, choices, strict=True)
    return [None if generation in recorded else choice for generation, choice in rows]
