"""Training data of the text model: talks about pictures of a gallery."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
from tokenizers import Tokenizer

from scripts.tools.demo.questions import END, MARKERS
from scripts.tools.demo.seeing.world import BLIND, QUESTIONS, SMALL_TALK, which
from scripts.tools.demo.training.seeing.batch import Batch, Row
from scripts.tools.demo.training.seeing.gallery import Exhibit
from scripts.tools.demo.training.seeing.tokenizer import SOFT, START, STOP, token_id


class Seen(NamedTuple):
    """A picture as the tower has encoded it."""

    exhibit: Exhibit
    features: mx.array


class _Turn(NamedTuple):
    question: str
    answer: str
    new: Sequence[Seen] = ()
    """The pictures before the question."""


class Dialogues:
    """An endless, seeded source of training batches."""

    def __init__(self, tokenizer: Tokenizer, seen: Sequence[Seen], seed: int) -> None:
        self._rng = random.Random(seed)
        self._tokenizer, self._seen = tokenizer, seen
        self._soft = token_id(tokenizer, SOFT)

    def batch(self, rows: int) -> Batch:
        """Returns `rows` talks."""
        return Batch.of([self._row(self._talk()) for _ in range(rows)])

    def _talk(self) -> list[_Turn]:
        rng = self._rng
        before = [self._without_picture()] if rng.random() < 0.3 else []
        if rng.random() < 0.4:
            seen = rng.choice(self._seen)
            asked = rng.sample([*QUESTIONS], 3)
            first, *rest = (_Turn(question, QUESTIONS[question](seen.exhibit.scene)) for question in asked)
            turns = [first._replace(new=(seen,)), *rest]
        else:
            pair = rng.sample(self._seen, 2)
            first, second = (_Turn(which(index), each.exhibit.scene.sentence) for index, each in enumerate(pair))
            if rng.random() < 0.7:
                later, sooner = rng.sample((first, second), 2)
                turns = [sooner._replace(new=pair), later]
            else:  # the second picture comes later
                question = rng.choice([*QUESTIONS])
                opening = _Turn(question, QUESTIONS[question](pair[0].exhibit.scene), pair[:1])
                turns = [opening, second._replace(new=pair[1:]), first]
        if rng.random() < 0.2:
            turns.insert(1, self._small_talk())
        return [*before, *turns]

    def _without_picture(self) -> _Turn:
        if self._rng.random() < 0.5:
            return self._small_talk()
        return _Turn(self._rng.choice([*QUESTIONS, which(0), which(1)]), BLIND)

    def _small_talk(self) -> _Turn:
        return _Turn(*self._rng.choice([*SMALL_TALK.items()]))

    def _row(self, talk: Sequence[_Turn]) -> Row:
        row = Row()
        for question, answer, new in talk:
            row.say(self._ids(MARKERS["user"]), counts=False)
            for exhibit, features in new:
                row.say(self._ids(START), counts=False)
                row.show(self._soft, features, exhibit.rows, exhibit.columns)
                row.say(self._ids(STOP), counts=False)
            row.say(self._ids(f"{question}{END}{MARKERS['assistant']}"), counts=False)
            row.say(self._ids(f"{answer}{END}"), counts=True)
        return row

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
