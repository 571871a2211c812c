"""A conversation as the demo holds it, turn by turn."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scripts.tools.demo.questions import Conversation, Message, Turn, messages, render

_MARKER = re.compile(r"\[img-(\d+)\]")


@dataclass
class Talk:
    """The questions of a user, and the answers that are expected.

    Answers that are not known beforehand are those that are given first: asked again, the model must repeat them.
    """

    title: str
    questions: Sequence[str]
    """With the marker [img-N] where the user shows picture N."""
    write: Callable[[Sequence[Message]], str]
    """Returns the prompt for a chat, in the model's own form."""
    system: str | None = None
    answers: list[str] = field(default_factory=list)
    """The expected ones, of as many turns as are known."""
    pictures: Sequence[bytes] = ()
    """Their files."""
    shows: Sequence[str] = ()
    """What each of them shows, in words."""

    @classmethod
    def known(cls, conversation: Conversation) -> "Talk":
        """Returns a talk with the demo model, whose answers are known."""
        questions, answers = zip(*conversation.turns, strict=True)
        return cls(conversation.title, questions, render, conversation.system, list(answers))

    def prompt(self, turn: int) -> str:
        """Returns the prompt of turn number `turn` (from 0), with the expected answers of the turns before it."""
        earlier = [Turn(*pair) for pair in zip(self.questions[:turn], self.answers, strict=False)]
        return self.write(messages(earlier, self.questions[turn], self.system))

    def told(self, turn: int) -> str:
        """Returns what the user says in a turn for people to read, with pictures in words."""
        return _MARKER.sub(lambda found: f"[{self.shows[int(found[1])]}] ", self.questions[turn])

    def expected(self, turn: int, answer: str) -> str:
        """Returns the right answer to a turn; to one without, `answer` is the right one from now on."""
        if turn == len(self.answers):
            self.answers.append(answer)
        return self.answers[turn]
