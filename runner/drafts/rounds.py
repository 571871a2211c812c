"""Rounds: forwards over the next token of each answer of a batch and the drafts after that token.

Answers may have different numbers of drafts; rows with fewer drafts are padded. Every position draws a token with its
own random number, and a draft is right only if it equals the drawn token. So no draft can change an answer."""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import mlx.core as mx

from runner.cpu import asks_for
from runner.drafts.drafting import AnswerDrafter, DraftedAnswer, DraftedStep, Drafting, StepTime
from runner.engine.batch import Batch
from runner.engine.generation import Generation
from runner.engine.policy import StepLimit
from runner.sampling.filters import Mask
from runner.sampling.sample import Choice, SampledTokens
from runner.trace import TRACE

_PATIENCE_S = 0.005  # the time that a grammar has to look ahead; drafts whose masks it then lacks are not tried
_MEASURED_STEPS = 8  # while no draft is at hand, the time of one in this many steps is recorded


class AnswerDrafts(NamedTuple):
    """The drafts of one answer in a round."""

    tokens: Sequence[int] = ()
    """The drafts, which may follow the recorded tokens."""
    masks: Sequence[Mask | None] = ()
    """The grammar's masks: for the next token, and for the token after each draft. Empty without a grammar."""
    forcing: Collection[int] = ()
    """The indices of the drafts after which the grammar forces the next token."""


class AnswerRound:
    """One answer in a round, from before the forward until the layers are brought back to the end of the right tokens.
    Owner: the engine thread."""

    def __init__(self, generation: Generation, drafts: AnswerDrafts, unseen: Sequence[int], vocab_size: int) -> None:
        """`unseen` are the recorded tokens that the layers have not seen: the last one, after any forced tokens."""
        self._generation = generation
        self._drafts = drafts
        self._unseen = unseen
        self._start = len(generation.session.recorded) - len(unseen)
        self._sampler = generation.sampler(vocab_size)
        self._right = 0  # the number of right drafts

    @property
    def tokens(self) -> list[int]:
        """The answer's tokens in the forward: the unseen tokens, and the drafts."""
        return [*self._unseen, *self._drafts.tokens]

    def draw(self, logits: mx.array) -> SampledTokens:
        """Draws the next token and a token after each draft, lazily. `logits` [L, V] are those of `tokens`."""
        drafts, masks, _ = self._drafts
        return self._sampler.draw_ahead(logits[-1 - len(drafts) :], drafts, masks)

    def is_from_numbers(self, drawn: Sequence[Choice]) -> bool:
        """Returns False if a drawn token is not from numbers. Then the caller drops the round, and the answer tries no
        more drafts. A draft may be the cause, even at positions before it: attention multiplies its masked values by 0,
        and NaN times 0 is NaN."""
        is_from_numbers = all(each.from_numbers for each in drawn)
        if not is_from_numbers and (drafter := _drafter_of(self._generation)):
            drafter.gives_up = True
        return is_from_numbers

    def choose(self, drawn: Sequence[Choice]) -> Choice:
        """Returns the next token and the tokens after the right drafts, and records how many drafts were right."""
        drafts = self._drafts.tokens
        while self._right < len(drafts) and drawn[self._right].token == drafts[self._right]:
            self._right += 1
        life, tried = self._generation.life, len(drafts)
        life.drafted += tried
        life.accepted += self._right
        if tried and (drafter := _drafter_of(self._generation)):
            drafter.record_outcome(tried, self._right, life)
        self._sampler.skip([choice.token for choice in drawn[: self._right + 1]])
        return self._as_choice(drawn[: self._right + 1])

    def _as_choice(self, drawn: Sequence[Choice]) -> Choice:
        """Returns the drawn tokens as one choice. As without drafts, a token that the grammar forced is part of the
        choice before it."""
        choices = [drawn[0]]
        for place, each in enumerate(drawn[1:]):
            if place in self._drafts.forcing:
                choices[-1] = choices[-1]._replace(forced=[*choices[-1].forced, each.token])
            else:
                choices.append(each)
        return choices[0]._replace(following=choices[1:])

    @property
    def right(self) -> int:
        """The number of tokens in the forward that are part of the answer: the unseen tokens and the right drafts."""
        return len(self._unseen) + self._right

    @property
    def kept(self) -> int:
        """The number of tokens in the forward that the layers should keep: those that they would have seen if the
        recorded tokens had been decoded one by one."""
        generation = self._generation
        unseen = generation.unseen if generation.has_ended else 0
        end = len(generation.session.recorded) - unseen
        return max(0, min(self.right, end - self._start))


class BatchRounds:
    """The rounds of one batch. Owner: the engine thread."""

    def __init__(self, drafting: Drafting, batch: Batch) -> None:
        self._drafting = drafting
        self._batch = batch
        # Valid until a generation joins or leaves.
        self._generations: Sequence[Generation] = ()
        self._drafted: Sequence[tuple[int, Generation, AnswerDrafter]] = ()  # those with drafters, and their rows
        # Valid until the next step.
        self._rounds: Sequence[AnswerRound] = ()  # the last round, until it is accepted
        self._asked_rows = 0.0  # the mean rows of an answer without padding, if padding was skipped
        self._measured_at = batch.steps  # the number of the last recorded step
        self.ahead = True

    def try_step(self, limit: StepLimit | None) -> Sequence[Choice] | None:
        batch = self._batch
        if batch.generations is not self._generations:
            self._regroup()
        self._asked_rows = 0.0
        is_drawn, drafted = batch.in_flight is not None, self._drafted
        drafts: Sequence[AnswerDrafts] = ()
        if (
            (not self._rounds or self.accept())
            and limit is not None
            and (drafted and batch.vocab_size and batch.rows.may_draft)
            and not all(batch.steps % drafter.every for _, _, drafter in drafted)
            and self._drafting.look([(drafter, each.session) for _, each, drafter in drafted], batch.steps)
        ):
            drafts = self._find(limit)
        if TRACE.on:
            TRACE.lap("drafts")
        if drafts and not is_drawn:
            self.ahead = True
            return self._run(drafts)
        # If no answer has a drafter, a forward is always dispatched ahead. Else the layers would end a token earlier,
        # and the cache would keep less of an answer.
        self.ahead = not drafts and (is_drawn or not drafted or limit is None or limit.ahead)
        return None

    def _regroup(self) -> None:
        """Lists the answers that have drafters. Called after an answer has joined or left the batch."""
        self._generations = self._batch.generations
        rows = enumerate(self._generations)
        self._drafted = [(row, each, drafter) for row, each in rows if (drafter := _drafter_of(each))]

    def _find(self, limit: StepLimit) -> Sequence[AnswerDrafts]:
        """Returns the drafts of each answer that a round in this step should try; an empty result means no round. If
        the tokens of this step are already drawn, any other result means that the next step should be a round."""
        batch, drafted, is_drawn = self._batch, self._drafted, self._batch.in_flight is not None
        if not is_drawn:
            batch.release_samplers()  # a model that drafts needs the state of each answer's sampler
        answers, lengths = [], batch.rows.lengths
        for row, each, drafter in drafted:
            wanted = each.request.most_drafts
            most = each.room - 1 if wanted is None else min(each.room - 1, wanted)
            if most > int(is_drawn) and not (drafter.gives_up or each.grammar.over):
                sampler = each.sampler(batch.vocab_size)
                answers.append(DraftedAnswer(drafter, each.session, most, sampler, row, lengths[row]))
        if not answers:
            return ()
        step = DraftedStep(answers, len(batch.generations), limit, batch.rows.layers)
        if is_drawn:
            return [AnswerDrafts((0,))] if self._drafting.expects(step) else ()
        proposed: list[Sequence[int]] = [()] * step.together
        for answer, tokens in zip(answers, self._drafting.propose(step), strict=True):
            proposed[answer.row] = tokens[: answer.most]
        pairs = zip(batch.generations, proposed, strict=True)
        allowed = [_allowed(each, tokens, batch.vocab_size) for each, tokens in pairs]
        return allowed if any(each.tokens for each in allowed) else ()

    def _run(self, drafts: Sequence[AnswerDrafts]) -> Sequence[Choice] | None:
        """Runs a round. Returns for each answer the next token and the tokens after right drafts; None if a token is
        not from numbers, or if the layers cannot forget wrong drafts of this batch."""
        batch = self._batch
        answers = zip(batch.generations, drafts, batch.rows.unseen, strict=True)
        rounds = [AnswerRound(generation, each, unseen, batch.vocab_size) for generation, each, unseen in answers]
        tokens = [each.tokens for each in rounds]
        counts = [len(each) for each in tokens]
        longest = max(counts)
        padded = mx.array([[*row, *row[-1:] * (longest - len(row))] for row in tokens])
        skips = len(rounds) > 1 and self._drafting.policy.skips_padding
        with asks_for(counts, longest) if skips else nullcontext():
            logits = batch.run(batch.rows.draft, padded)
        if logits is None:
            return None
        samples = [each.draw(row[: len(each.tokens)]) for each, row in zip(rounds, logits, strict=True)]
        mx.async_eval([array for sample in samples for array in sample.arrays()])
        drawn = [sample.read() for sample in samples]
        are_from_numbers = [each.is_from_numbers(its) for each, its in zip(rounds, drawn, strict=True)]
        if TRACE.on:
            TRACE.lap("wait")
        if not all(are_from_numbers):
            batch.rows.take_back(longest)
            return None
        if skips:
            self._asked_rows = sum(counts) / len(counts)
        self._rounds = rounds
        return [each.choose(its) for each, its in zip(rounds, drawn, strict=True)]

    def accept(self, leaving: Collection[int] = (), *, awaiting: bool = False) -> bool:
        rounds, self._rounds = self._rounds, ()
        if not rounds:
            return True
        return self._batch.rows.accept(
            [each.right if awaiting and row not in leaving else each.kept for row, each in enumerate(rounds)]
        )

    def measures(self) -> bool:
        if self._batch.generations is not self._generations:  # a generation has left in this step
            self._regroup()
        return bool(self._drafted) and (self._batch.steps % _MEASURED_STEPS == 0 or self._drafting.measuring > 0)

    def record_time(self, seconds: float, tokens: int) -> None:
        batch, seconds = self._batch, self._drafting.step_s(seconds)
        steps, self._measured_at = batch.steps - self._measured_at, batch.steps
        asked = self._asked_rows or batch.latest_rows
        time = StepTime(seconds, tokens, len(batch.generations), batch.forward_rows, asked, steps)
        self._drafting.record_time([drafter for _, _, drafter in self._drafted], time)


def _drafter_of(generation: Generation) -> AnswerDrafter | None:
    assert generation.drafter is None or isinstance(generation.drafter, AnswerDrafter)
    return generation.drafter


def _allowed(generation: Generation, proposed: Sequence[int], vocab_size: int) -> AnswerDrafts:
    """Returns the beginning of a draft that a round may try. It ends before a token that the vocabulary lacks or that
    the grammar forbids, and at an end token."""
    grammar, eos, drafts = generation.grammar, generation.tokenizer.eos, list[int]()
    for token in proposed:
        if not 0 <= token < vocab_size or (grammar.guide is not None and token in eos):
            break
        drafts.append(token)
        if token in eos:
            break
    if grammar.guide is None:
        return AnswerDrafts(drafts)
    masks, forcing = grammar.look_ahead(drafts, _PATIENCE_S) if drafts else ([], set[int]())
    if drafts and not masks and (drafter := _drafter_of(generation)):
        drafter.record_outcome(1, 0, generation.life)
    return AnswerDrafts(drafts[: len(masks)], [grammar.mask, *masks], forcing)
