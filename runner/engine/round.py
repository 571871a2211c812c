"""A round: one forward over the next token of a lone answer and drafts of those behind it.

Every row draws with its own position's random number, and a draft is right only if it is what was drawn. So an answer
is the same with drafts as without them, whatever they are.
"""

from collections.abc import Sequence

import mlx.core as mx

from runner.engine.events import Event
from runner.engine.generation import Generation
from runner.sampling.sample import Choice


class Round:
    """A round of one answer, from its forward until the layers stand behind what was right. Owner: the engine
    thread."""

    def __init__(self, generation: Generation, drafts: Sequence[int]) -> None:
        """`drafts` may follow the recorded tokens, the last of which the layers have not seen."""
        self._generation = generation
        self._drafts = drafts
        self._right = 0  # drafts

    def draw(self, logits: mx.array) -> Choice:
        """Draws from the logits [1, 1 + drafts, V] of the forward, and waits for the tokens. Returns the next one, and
        those behind it that are right, too."""
        sampler = self._generation.sampler(logits.shape[-1])
        sample = sampler.draw_ahead(logits[0], self._drafts)
        mx.async_eval(sample.arrays())
        drawn = sample.read()
        while self._right < len(self._drafts) and drawn[self._right].token == self._drafts[self._right]:
            self._right += 1
        self._learn()
        following = drawn[1 : self._right + 1]
        sampler.skip([choice.token for choice in drawn[: self._right + 1]])
        return drawn[0]._replace(following=following)

    def _learn(self) -> None:
        life, drafter = self._generation.life, self._generation.drafter
        life.drafted += len(self._drafts)
        life.accepted += self._right
        if drafter is not None:
            drafter.learn(len(self._drafts), self._right)

    @property
    def tokens(self) -> mx.array:
        """The tokens [1, 1 + drafts] of the forward."""
        return mx.array([[self._generation.session.recorded[-1], *self._drafts]])

    def accept(self) -> None:
        """Takes the layers to where they would stand if the recorded tokens had come one by one; if they cannot, to
        where they stood before the round: then the recorded tokens are computed again in one forward."""
        session = self._generation.session
        right = min(1 + self._right, len(session.recorded) - session.position)
        session.accept(right)


def find_drafts(generation: Generation, vocab_size: int, *, on_its_way: bool) -> Sequence[int]:
    """Returns tokens to try behind the recorded ones; the last of them may end the answer.

    If a token is `on_its_way` and not recorded yet, returns a token that stands for those that a round should try
    behind it.
    """
    drafter, session = generation.drafter, generation.session
    if drafter is None or generation.guide is not None or len(session.recorded) - session.position > 1:
        return ()
    most = min(generation.room - 1, generation.most_drafts)
    if on_its_way:
        return (0,) if most > 1 and drafter.expects(session, most) else ()
    drafts = []
    for token in drafter.propose(session, most) if most > 0 else ():
        if not 0 <= token < vocab_size:
            break
        drafts.append(token)
        if token in generation.tokenizer.eos:
            break
    return drafts


def take_all(generation: Generation, choice: Choice) -> list[Event]:
    """Gives a generation its next token, and those that follow it, up to the end of the answer. Returns the events."""
    events: list[Event] = []
    for each in (choice, *choice.following):
        if not generation.done:
            events += generation.take(each)
    return events


def unseen_at_end(generation: Generation) -> list[int]:
    """Returns the recorded tokens that the layers would have seen by the end of the answer if they had come one by one,
    and have not."""
    recorded, last = generation.session.recorded, 1
    if generation.life.outcome == "done":
        last = int(generation.room < (2 if recorded[-1] in generation.tokenizer.eos else 1))
    return recorded[generation.session.position : len(recorded) - last]
