"""Questions about pictures that training never shows, and their answers.

Scenes are few, and all are trained; their pictures differ in size, in the exact place, and in every pixel.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from scripts.tools.demo.questions import Turn, messages, render
from scripts.tools.demo.seeing.drawing import SIZES, held_out_seed, png
from scripts.tools.demo.seeing.world import QUESTIONS, scenes, which


class Look(NamedTuple):
    """A prompt with its pictures' files, and the right answer."""

    prompt: str
    pictures: Sequence[bytes]
    answer: str


def held_out_looks(count: int = 200, seed: int = 20_000) -> list[Look]:
    """`count` questions, in turn: each about one picture, one about one of two, one about a picture shown earlier."""
    rng = random.Random(seed)
    return [_look(rng, index % (len(QUESTIONS) + 2)) for index in range(count)]


def _look(rng: random.Random, kind: int) -> Look:
    pair = [rng.choice(scenes()) for _ in range(2)]
    pictures = [png(scene, held_out_seed(rng), rng.choice(SIZES)) for scene in pair]
    questions = list(QUESTIONS)
    if kind < len(questions):
        question, (scene, _) = questions[kind], pair
        return Look(render(messages([], f"[img-0]{question}")), pictures[:1], QUESTIONS[question](scene))
    if kind == len(questions):
        number = rng.randrange(2)
        return Look(render(messages([], f"[img-0][img-1]{which(number)}")), pictures, pair[number].sentence)
    first, later = rng.sample(questions, 2)
    turn = Turn(f"[img-0]{first}", QUESTIONS[first](pair[0]))
    return Look(render(messages([turn], later)), pictures[:1], QUESTIONS[later](pair[0]))
