"""The talks of the demo about pictures, and their right answers."""

from scripts.tools.demo.questions import render
from scripts.tools.demo.seeing.drawing import png
from scripts.tools.demo.seeing.world import QUESTIONS, Scene, which
from scripts.tools.demo.talk import Talk

_SIZE = (320, 256)
RED = Scene("red", "at the top left")
BLUE = Scene("blue", "at the bottom right")
PICTURES = {RED: png(RED, 1, _SIZE), BLUE: png(BLUE, 3, _SIZE)}
"""Of one size, so that only what they show tells them apart. Odd seeds are held out of training."""


def _about_one(title: str, scene: Scene, *questions: str) -> Talk:
    """A talk that begins with a picture."""
    answers = [QUESTIONS[question](scene) for question in questions]
    first, *rest = questions
    return Talk(
        title, (f"[img-0]{first}", *rest), render, answers=answers, pictures=[PICTURES[scene]], shows=[str(scene)]
    )


def _about_two(title: str, *scenes: Scene) -> Talk:
    """A talk about two pictures in this order."""
    return Talk(
        title,
        (f"[img-0][img-1]{which(0)}", which(1)),
        render,
        answers=[scene.sentence for scene in scenes],
        pictures=[PICTURES[scene] for scene in scenes],
        shows=[*map(str, scenes)],
    )


_ONE = ("What do you see?", "What colour is the circle?", "Where is the circle?")
TALKS = (
    _about_one("A picture", RED, *_ONE),
    _about_one("Another picture of the same size", BLUE, *_ONE),
    _about_one("The first picture again", RED, "Where is the circle?", "What do you see?"),
    _about_two("Two pictures", RED, BLUE),
    _about_two("The same two, the other way round", BLUE, RED),
)
