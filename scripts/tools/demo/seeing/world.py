"""The little world of the model that sees: a coloured circle in some place of a picture, and what is said about them.

What is in a picture is arbitrary, so a right answer can only come from the picture: a runner that mixes two up, or
shows none, gets another answer. No MLX here, so that a host can import it.
"""

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

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
"""Where the middle of the circle is, as shares of width and height."""
ORDINALS = ("first", "second")


class Scene(NamedTuple):
    """What is in a picture, as the model says it."""

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
    """Returns all scenes."""
    return [Scene(*each) for each in product(COLOURS, PLACES)]
