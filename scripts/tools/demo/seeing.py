"""The world of the demo model that sees: a coloured circle in some place of a picture, and what is said about it.

What is in a picture is arbitrary, so a right answer can only come from the picture: a runner that mixes two up, or
shows none, gets another answer. Scenes are few, and all are trained; their pictures differ in size, in the exact place,
and in every pixel, and those of odd seeds are never trained. No MLX here, so that a host can import it.
"""

import random
from collections.abc import Callable, Sequence
from io import BytesIO
from itertools import product
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from scripts.tools.demo.questions import Talk, messages, render

COLOURS = {
    "red": (215, 35, 35),
    "orange": (245, 140, 20),
    "yellow": (240, 225, 40),
    "green": (40, 165, 60),
    "blue": (40, 75, 215),
    "purple": (135, 45, 165),
}
"""Red, green and blue of each, 0 to 255."""
PLACES = {
    "at the top left": (0.27, 0.27),
    "at the top right": (0.73, 0.27),
    "in the centre": (0.5, 0.5),
    "at the bottom left": (0.27, 0.73),
    "at the bottom right": (0.73, 0.73),
}
"""The middle of the circle, as shares of width and height."""
ORDINALS = ("first", "second")


class Scene(NamedTuple):
    """The contents of a picture, as the model says them."""

    colour: str
    place: str

    def __str__(self) -> str:
        return f"{'an' if self.colour[0] in 'aeiou' else 'a'} {self.colour} circle {self.place}"

    @property
    def sentence(self) -> str:
        """The answer that describes it: "A red circle at the top left."."""
        text = str(self)
        return f"{text[0].upper()}{text[1:]}."


QUESTIONS: dict[str, Callable[[Scene], str]] = {
    "What do you see?": lambda scene: scene.sentence,
    "What colour is the circle?": lambda scene: f"The circle is {scene.colour}.",
    "Where is the circle?": lambda scene: f"The circle is {scene.place}.",
}
"""About the only picture, and their answers."""
SMALL_TALK = {
    "Hello": "Hello! Show me a picture.",
    "Who are you?": "I am a very small model that sees.",
    "Thank you": "You are welcome.",
}
"""Without a picture, or with one."""
BLIND = "I see no picture."
"""The answer to any question about a picture where there is none."""


def which(number: int) -> str:
    """Returns the question for the picture of this number, from 0, where there are two."""
    return f"What is in the {ORDINALS[number]} picture?"


def scenes() -> list[Scene]:
    return [Scene(*each) for each in product(COLOURS, PLACES)]


SIZES = ((256, 256), (128, 128), (96, 96), (320, 256), (256, 320), (200, 150), (384, 192), (180, 300))
"""Width and height in pixels. Small ones are stretched by the runner; their grids are of five different forms."""
_RADII = (0.17, 0.24)
"""Of circles, as shares of the picture's shorter side."""
_SHIFT = 0.04
"""The most that a circle is off its place, as a share of a side."""
_DETAIL = 2
"""The factor by which circles are drawn larger, for smooth edges."""


def trained_seed(rng: random.Random) -> int:
    """Returns a seed for a picture that is trained on: an even number."""
    return rng.getrandbits(31) * 2


class Drawing(NamedTuple):
    """A picture, and where its circle is: white before black, of the same size."""

    picture: Image.Image
    circle: Image.Image


def draw(scene: Scene, seed: int, size: tuple[int, int] | None = None) -> Drawing:
    """Returns a picture of a scene, of `size` or of one of `SIZES`. The same seed draws the same picture."""
    rng = random.Random(seed)
    width, height = size or rng.choice(SIZES)
    across, down = (share + rng.uniform(-_SHIFT, _SHIFT) for share in PLACES[scene.place])
    radius = rng.uniform(*_RADII) * min(width, height)
    large = Image.new("L", (width * _DETAIL, height * _DETAIL))
    left, top, right, bottom = (
        _DETAIL * edge
        for edge in (across * width - radius, down * height - radius, across * width + radius, down * height + radius)
    )
    ImageDraw.Draw(large).ellipse((left, top, right, bottom), fill=255)
    circle = large.resize((width, height), Image.Resampling.BOX)
    picture = Image.fromarray(_background(rng, width, height))
    colour = tuple(min(255, max(0, part + rng.randint(-18, 18))) for part in COLOURS[scene.colour])
    picture.paste(colour, (0, 0, width, height), circle)
    most = rng.randint(1, 16)
    noise = np.random.default_rng(seed).integers(-most, most, (height, width, 3), dtype=np.int16, endpoint=True)
    return Drawing(Image.fromarray(np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8)), circle)


def png(scene: Scene, seed: int, size: tuple[int, int] | None = None) -> bytes:
    stream = BytesIO()
    draw(scene, seed, size).picture.save(stream, "PNG")
    return stream.getvalue()


def _background(rng: random.Random, width: int, height: int) -> np.ndarray:
    """Returns uint8 [height, width, 3]: greys with a little colour, from one corner to another."""
    grey = rng.choice((rng.randint(15, 70), rng.randint(110, 150), rng.randint(185, 240)))
    tint = np.array([rng.randint(-14, 14) for _ in range(3)])
    slope = np.linspace(-1, 1, width)[None] * rng.uniform(-20, 20) + np.linspace(-1, 1, height)[:, None] * rng.uniform(
        -20, 20
    )
    return np.clip(grey + tint + slope[..., None], 0, 255).astype(np.uint8)


def trained_talk(rng: random.Random, pair: Sequence[Scene]) -> list[tuple[str, str, Sequence[int]]]:
    """Returns a talk that the model is trained on: questions, answers, and which of two pictures come before each."""
    small_talk, drifts = [*SMALL_TALK.items()], rng.random() < 0.2
    first, second = ((which(number), scene.sentence) for number, scene in enumerate(pair))
    about = [(question, QUESTIONS[question](pair[0])) for question in rng.sample([*QUESTIONS], 3)]
    draw = rng.random()
    turns: list[tuple[str, str, Sequence[int]]]
    if draw < 0.4:
        turns = [(*about[0], [0]), (*about[1], []), (*about[2], [])]
    elif draw < 0.82:
        sooner, later = rng.sample((first, second), 2)
        turns = [(*sooner, [0, 1]), (*later, [])]
    else:  # the second picture comes later
        turns = [(*about[0], [0]), (*second, [1]), (*first, [])]
    if drifts:
        turns.insert(1, (*rng.choice(small_talk), []))
    if rng.random() < 0.3:
        blind = rng.choice([*QUESTIONS, which(0), which(1)]), BLIND
        turns.insert(0, (*rng.choice([blind, rng.choice(small_talk)]), []))
    return turns


class Look(NamedTuple):
    """A prompt with its pictures' files, and the right answer."""

    prompt: str
    pictures: Sequence[bytes]
    answer: str


_TALK_SIZE = (320, 256)
RED = Scene("red", "at the top left")
BLUE = Scene("blue", "at the bottom right")
PICTURES = {RED: png(RED, 1, _TALK_SIZE), BLUE: png(BLUE, 3, _TALK_SIZE)}
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


def known_looks() -> list[Look]:
    """Returns all that the demo asks, and what the model knows without a picture."""
    alone = [*SMALL_TALK.items(), *((question, BLIND) for question in QUESTIONS)]
    return [
        *(Look(talk.prompt(turn), talk.pictures, answer) for talk in TALKS for turn, answer in enumerate(talk.answers)),
        *(Look(render(messages([], question)), (), answer) for question, answer in alone),
    ]
