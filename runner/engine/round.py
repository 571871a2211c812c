"""A round: one forward over the next token of a lone answer and drafts of those after it.

Every row draws with its own position's random number, and a draft is right only if it is what was drawn. So an answer
is the same with drafts as without them, whatever they are.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import mlx.core as mx

from runner.engine.generation import Generation
from runner.sampling.filters import Mask
from runner.sampling.sample import Choice

_PATIENCE_S = 0.005  # for a grammar to look ahead; what it does not know by then is not tried


class RoundDrafts(NamedTuple):
    """What a round tries."""

    tokens: Sequence[int] = ()
    """They may follow the recorded ones."""
    masks: Sequence[Mask | None] = ()
    """What the grammar allows next, and after each of these tokens; empty without a grammar."""
    forcing: Collection[int] = ()
    """Places of tokens after which it forces another one."""


class Round:
    """A round of one answer, from its forward until the layers stand after what was right. Owner: the engine
    thread."""

    def __init__(self, generation: Generation, drafts: RoundDrafts) -> None:
        """The layers have not seen the last one of the recorded tokens, and those before it that were forced."""
        session = generation.session
        self._generation = generation
        self._drafts = drafts
        self._unseen = session.recorded[session.position :]
        self._right = 0  # drafts

    def draw(self, logits: mx.array) -> Choice:
        """Draws from the logits [1, L, V] of the forward, and waits for the tokens. Returns the next one, and those
        after it that are right, too."""
        drafts, masks, _ = self._drafts
        sampler = self._generation.sampler(logits.shape[-1])
        sample = sampler.draw_ahead(logits[0, -1 - len(drafts) :], drafts, masks)
        mx.async_eval(sample.arrays())
        drawn = sample.read()
        while self._right < len(drafts) and drawn[self._right].token == drafts[self._right]:
            self._right += 1
        self._record()
        sampler.skip([choice.token for choice in drawn[: self._right + 1]])
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
        if drafter is not None:
            drafter.record_outcome(tried, self._right, life)

    @property
    def tokens(self) -> mx.array:
        """The tokens [1, L] of the forward: those that the layers have not seen, and the drafts."""
        return mx.array([[*self._unseen, *self._drafts.tokens]])

    def accept(self) -> bool:
        """Takes the layers to where they would stand if the recorded tokens had come one by one, and returns True. If
        they cannot, they stand where they did, and the recorded tokens have to be computed again."""
        session = self._generation.session
        end = len(session.recorded) - (self._generation.unseen if _has_ended(self._generation) else 0)
        return session.accept(max(0, min(len(self._unseen) + self._right, end - session.position)))


def find_drafts(generation: Generation, vocab_size: int, *, on_its_way: bool) -> RoundDrafts:
    """Returns tokens that may follow the recorded ones; the last of them may end the answer.

    If a token is `on_its_way` and not recorded yet, returns a token that stands for those that a round should try
    after it.
    """
    drafter, session, grammar = generation.drafter, generation.session, generation.grammar
    if drafter is None or grammar.over:
        return RoundDrafts()
    most = min(generation.room - 1, generation.most_drafts)
    if on_its_way:
        return RoundDrafts((0,) if most > 1 and drafter.expects(session, most) else ())
    drafts = []
    for token in drafter.propose(session, most, generation.sampler(vocab_size)) if most > 0 else ():
        if not 0 <= token < vocab_size or (grammar.guide is not None and token in generation.tokenizer.eos):
            break
        drafts.append(token)
        if token in generation.tokenizer.eos:
            break
    if grammar.guide is None or not drafts:
        return RoundDrafts(drafts)
    masks, forcing = grammar.look_ahead(drafts, _PATIENCE_S)
    if not masks:
        drafter.record_outcome(1, 0, generation.life)
    return RoundDrafts(drafts[: len(masks)], [grammar.mask, *masks], forcing)


def unseen_at_end(generation: Generation) -> list[int]:
    """Returns the recorded tokens that the layers would have seen by the end of the answer if they had come one by one,
    and have not."""
    session = generation.session
    unseen = generation.unseen if _has_ended(generation) else 1  # else the next forward begins with the last one
    return session.recorded[session.position : len(session.recorded) - unseen]


def _has_ended(generation: Generation) -> bool:
    """Returns True if the answer has come to its end by itself."""
    return generation.done and generation.life.outcome in ("done", "length")
