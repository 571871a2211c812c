"""The world of the demo model that hears: one to three tones, low, middle or high, and what is said about them.

What is in a sound is arbitrary, so a right answer can only come from the sound. Tunes are few, and all are trained;
their sounds differ in pitch, loudness, time and every sample, and those of odd seeds are never trained. No MLX here, so
that a host can import it.
"""

import random
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from scripts.tools.demo.questions import Talk, messages, render
from scripts.tools.demo.seeing import Look
from scripts.tools.models.wav import RATE, Floats, wav

PITCHES = {"low": 330, "middle": 660, "high": 1320}
"""In hertz."""
MOST_TONES = 3
SAMPLES = 20_320
"""Of each sound: 32 soft tokens."""
Tune = tuple[str, ...]
"""The tones of a sound, in their order."""
_NUMBERS = ("One tone", "Two tones", "Three tones")


def sentence(tune: Tune) -> str:
    """The answer that describes a tune: "A low tone, then a high tone."."""
    text = ", then ".join(f"a {pitch} tone" for pitch in tune)
    return f"{text[0].upper()}{text[1:]}."


QUESTIONS: dict[str, Callable[[Tune], str]] = {
    "What do you hear?": sentence,
    "How many tones are there?": lambda tune: f"{_NUMBERS[len(tune) - 1]}.",
    "What is the first tone?": lambda tune: f"The first tone is {tune[0]}.",
    "What is the last tone?": lambda tune: f"The last tone is {tune[-1]}.",
}
"""About the sound, and their answers."""
SMALL_TALK = {"Hello": "Hello! Let me hear something.", "Thank you": "You are welcome."}
DEAF = "I hear nothing."
"""The answer to any question about a sound where there is none."""


def tunes() -> list[Tune]:
    return [tune for count in range(1, MOST_TONES + 1) for tune in product(PITCHES, repeat=count)]


def play(tune: Tune, seed: int) -> tuple[Floats, list[tuple[float, float]]]:
    """Returns the samples of a tune, and when each of its tones begins and ends, in seconds."""
    rng, times = random.Random(seed), []
    found = np.random.default_rng(seed).normal(0, 0.004, SAMPLES)
    at = rng.uniform(0.03, 0.12)
    for pitch in tune:
        length = rng.uniform(0.22, 0.28)
        steps = np.arange(round(length * RATE))
        edge = np.minimum(1, np.minimum(steps, steps[::-1]) / (0.01 * RATE))
        hertz = PITCHES[pitch] * rng.uniform(0.96, 1.04)
        start = round(at * RATE)
        turns = 2 * np.pi * hertz * steps / RATE + rng.uniform(0, 6)
        found[start : start + len(steps)] += rng.uniform(0.15, 0.6) * edge * np.sin(turns)
        times.append((at, at + length))
        at += length + rng.uniform(0.08, 0.12)
    return found.astype(np.float32), times


def sound(tune: Tune, seed: int) -> bytes:
    """Returns a WAV of a tune."""
    return wav(play(tune, seed)[0])


RISING: Tune = ("low", "middle", "high")
FALLING: Tune = ("high", "middle", "low")
SHORT: Tune = ("middle",)
SOUNDS = {tune: sound(tune, 1 + 2 * number) for number, tune in enumerate((RISING, FALLING, SHORT))}
"""Of one length, so that only what they hold tells them apart. Odd seeds are held out of training."""


def _about(title: str, tune: Tune, *questions: str) -> Talk:
    """A talk that begins with a sound."""
    first, *rest = questions
    answers = [QUESTIONS[question](tune) for question in questions]
    shows = ["-".join(tune)]
    return Talk(title, (f"[img-0]{first}", *rest), render, answers=answers, pictures=[SOUNDS[tune]], shows=shows)


_ALL = [*QUESTIONS]
TALKS: Sequence[Talk] = (
    _about("A sound", RISING, *_ALL),
    _about("The same tones, the other way round", FALLING, *_ALL),
    _about("The first sound again", RISING, *_ALL[::-1]),
    _about("A single tone", SHORT, *_ALL[:2]),
)


def known_looks() -> list[Look]:
    """Returns what the demo asks, each tune by a sound that was never trained, and what the model knows without one."""
    alone = [*SMALL_TALK.items(), *((question, DEAF) for question in QUESTIONS)]
    return [
        *(Look(talk.prompt(turn), talk.pictures, answer) for talk in TALKS for turn, answer in enumerate(talk.answers)),
        *(
            Look(render(messages([], f"[img-0]{_ALL[0]}")), [sound(tune, 1001 + 2 * number)], sentence(tune))
            for number, tune in enumerate(tunes())
        ),
        *(Look(render(messages([], question)), (), answer) for question, answer in alone),
    ]
