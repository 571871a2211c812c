"""A round: one forward over the next token of each answer of a batch and drafts of those after it.

Answers have different numbers of drafts, of which different ones are right; the shorter ones are padded. Every row
draws with its own position's random number, and a draft is right only if it is what was drawn. So an answer
is the same with drafts as without them, whatever they are.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import mlx.core as mx

from runner.cache.session import DecodeRows
from runner.engine.generation import Generation
from runner.engine.policy import StepLimit
from runner.engine.ports import DraftedAnswer
from runner.sampling.filters import Mask
from runner.sampling.sample import Choice, Sample
from runner.sampling.sampler import Sampler

_PATIENCE_S = 0.005  # for a grammar to look ahead; what it does not know by then is not tried


class RoundDrafts(NamedTuple):
    """What a round tries for one answer."""

    tokens: Sequence[int] = ()
    """They may follow the recorded ones."""
    masks: Sequence[Mask | None] = ()
    """What the grammar allows next, and after each of these tokens; empty without a grammar."""
    forcing: Collection[int] = ()
    """Places of tokens after which it forces another one."""


class Round:
    """The part of one answer in a round, from its forward until the layers stand after what was right. Owner: the
    engine thread."""

    def __init__(self, generation: Generation, drafts: RoundDrafts, unseen: Sequence[int]) -> None:
        """`unseen` are the recorded tokens that the layers have not seen: the last one, and those before it that were
        forced."""
        self._generation = generation
        self._drafts = drafts
        self._unseen = unseen
        self._start = len(generation.session.recorded) - len(unseen)
        self._right = 0  # drafts
        self._sampler: Sampler | None = None
        self._sample: Sample | None = None
        self._drawn: Sequence[Choice] = ()

    @property
    def tokens(self) -> list[int]:
        """Those of the forward: what the layers have not seen, and the drafts."""
        return [*self._unseen, *self._drafts.tokens]

    def draw(self, logits: mx.array) -> Sample:
        """Draws from the logits [L, V] of its tokens, for `read`. Evaluates nothing."""
        drafts, masks, _ = self._drafts
        self._sampler = self._generation.sampler(logits.shape[-1])
        self._sample = self._sampler.draw_ahead(logits[-1 - len(drafts) :], drafts, masks)
        return self._sample

    def read(self) -> bool:
        """Waits for the tokens that were drawn. Returns False if one of them is not from numbers. A draft may be to
        blame, also for those before it: attention multiplies what it must not look at by 0, and NaN stays NaN. So
        nothing of the round counts then, and the answer tries no further drafts."""
        assert self._sample is not None
        self._drawn = self._sample.read()
        is_from_numbers = all(each.from_numbers for each in self._drawn)
        if not is_from_numbers:
            self._generation.most_drafts = 0
        return is_from_numbers

    def choose(self) -> Choice:
        """Returns the next token, and those after it that are right, too."""
        assert self._sampler is not None
        drafts, drawn = self._drafts.tokens, self._drawn
        while self._right < len(drafts) and drawn[self._right].token == drafts[self._right]:
            self._right += 1
        self._record()
        self._sampler.skip([choice.token for choice in drawn[: self._right + 1]])
        return self._as_choice(drawn[: self._right + 1])

    def _as_choice(self, drawn: Sequence[Choice]) -> Choice:
        """Returns the tokens that came as one choice. Those that the grammar forced have been drawn, but belong to the
        one before them, as they do without drafts."""
        choices = [drawn[0]]
        for place, each in enumerate(drawn[1:]):
            if place in self._drafts.forcing:
                choices[-1] = choices[-1]._replace(forced=[*choices[-1].forced, each.token])
            else:
                choices.append(each)
        return choices[0]._replace(following=choices[1:])

    def _record(self) -> None:
        life, drafter, tried = self._generation.life, self._generation.drafter, len(self._drafts.tokens)
        life.drafted += tried
        life.accepted += self._right
        if drafter is not None and tried:
            drafter.record_outcome(tried, self._right, life)

    @property
    def right(self) -> int:
        """The number of its tokens that are right."""
        return len(self._unseen) + self._right

    @property
    def kept(self) -> int:
        """The number of its tokens after which the layers would stand if the recorded tokens had come one by one."""
        end = len(self._generation.session.recorded) - _unseen_at_end(self._generation)
        return max(0, min(self.right, end - self._start))


def padded(rounds: Sequence[Round]) -> mx.array:
    """Returns the tokens [B, L] of the forward."""
    rows = [each.tokens for each in rounds]
    length = max(map(len, rows))
    return mx.array([[*row, *row[-1:] * (length - len(row))] for row in rows])


def find_drafts(
    generations: Sequence[Generation], rows: DecodeRows, vocab_size: int, limit: StepLimit, *, on_its_way: bool
) -> list[RoundDrafts]:
    """Returns tokens that may follow the recorded ones of each answer; the last of them may end it. Empty if a round
    within the limit does not pay. Call it if their drafters have found anything.

    If tokens are `on_its_way` and not recorded yet, returns a token that stands for those that a round should try after
    them.
    """
    answers = []
    for row, (each, length) in enumerate(zip(generations, rows.lengths, strict=True)):
        most = min(each.room - 1, each.most_drafts)
        if each.drafter is not None and most > int(on_its_way) and not each.grammar.over:
            sampler = each.sampler(vocab_size)
            answers.append(DraftedAnswer(each.drafter, each.session, most, sampler, row, length))
    if not answers:
        return []
    drafts = answers[0].drafter.shared
    if on_its_way:
        return [RoundDrafts((0,))] if drafts.expects(answers, len(generations), limit) else []
    proposed: list[Sequence[int]] = [()] * len(generations)
    found = drafts.propose(answers, len(generations), rows.layers, limit)
    for answer, tokens in zip(answers, found, strict=True):
        proposed[answer.row] = tokens[: answer.most]
    allowed = [_allowed(each, tokens, vocab_size) for each, tokens in zip(generations, proposed, strict=True)]
    return allowed if any(each.tokens for each in allowed) else []


def _allowed(generation: Generation, proposed: Sequence[int], vocab_size: int) -> RoundDrafts:
    """Returns the first tokens of a draft, as far as they may come."""
    grammar, eos, drafts = generation.grammar, generation.tokenizer.eos, list[int]()
    for token in proposed:
        if not 0 <= token < vocab_size or (grammar.guide is not None and token in eos):
            break
        drafts.append(token)
        if token in eos:
            break
    if grammar.guide is None:
        return RoundDrafts(drafts)
    masks, forcing = grammar.look_ahead(drafts, _PATIENCE_S) if drafts else ([], set[int]())
    if drafts and not masks and generation.drafter is not None:
        generation.drafter.record_outcome(1, 0, generation.life)
    return RoundDrafts(drafts[: len(masks)], [grammar.mask, *masks], forcing)


def unseen_at_end(generation: Generation) -> list[int]:
    """Returns the recorded tokens that the layers would have seen by the end of the answer if they had come one by one,
    and have not."""
    session = generation.session
    unseen = _unseen_at_end(generation) if _has_ended(generation) else 1  # the next forward begins with the last one
    return session.recorded[session.position : len(session.recorded) - unseen]


def _unseen_at_end(generation: Generation) -> int:
    """Returns the recorded tokens, from the last one back, that the layers do not see, as the answer ends with them."""
    return generation.unseen if _has_ended(generation) else 0


def _has_ended(generation: Generation) -> bool:
    """Returns True if the answer has come to its end by itself."""
    return generation.done and generation.life.outcome in ("done", "length")
