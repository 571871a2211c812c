"""The models that the demo talks to, and the talks with each."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from scripts.tools import ROOT
from scripts.tools.demo.questions import CONVERSATIONS, END, Message, Talk
from scripts.tools.models.store import write_store, write_tag
from scripts.tools.real import chat

MODEL, SEEING_MODEL, HEARING_MODEL = "demo:latest", "demo-seeing:latest", "demo-hearing:latest"
WEIGHTS, SEEING_WEIGHTS, HEARING_WEIGHTS = (
    ROOT / "scripts" / name for name in ("demo_model", "demo_seeing_model", "demo_hearing_model")
)
_STORED = {MODEL: WEIGHTS, SEEING_MODEL: SEEING_WEIGHTS, HEARING_MODEL: HEARING_WEIGHTS}
TURNS = ((0, (0, 1)), (1, (0,)), (0, (2,)), (1, (1,)))
"""The talks in the order in which they are held, and the turns of each."""
REAL_QUESTIONS = {
    "Capitals": ("What is the capital of France?", "And the capital of Italy?", "Name three things to see there."),
    "The sky": ("Why is the sky blue?", "Say that in five words."),
}
GREEDY = {"num_predict": 200, "temperature": 0}
REAL_LENGTH = 60
"""The most tokens of an answer of the real model, which may have much to say."""
KNOWN = "Every answer was the expected one."


class Subject(NamedTuple):
    """A model that the demo talks to. `sample` is a prompt to try, `end` the token that ends a message."""

    model: str
    models_dir: Path | None
    talks: Sequence[Talk]
    turns: Sequence[tuple[int, Sequence[int]]]
    """The talks in the order in which they are held, and the turns of each."""
    options: Mapping[str, int]
    sample: str
    end: str
    right: str
    """The last line, if every answer was the right one."""
    shown: bytes | None = None
    """The picture, or the sound, that the sample shows."""
    kind: str = "image"
    """Of what the talks show."""


@contextmanager
def demo_store(*models: str, new_store: bool = False) -> Iterator[Path]:
    """Makes a store with these demo models, or the first one, as float32, in which a CPU computes fastest.

    `new_store` puts their tags where Ollama 0.40 does.
    """
    with tempfile.TemporaryDirectory(prefix="mlx-runner-demo-") as name:
        root = Path(name)
        for model in models or (MODEL,):
            directory = _STORED[model]
            source = root / directory.name
            shutil.copytree(directory, source)
            weights = mx.load(str(directory / "model.safetensors"))
            assert isinstance(weights, dict)
            wide = {key: value.astype(mx.float32) for key, value in weights.items()}
            mx.save_safetensors(str(source / "model.safetensors"), wide, {"format": "mlx"})
            store = write_store(root / "models", model, source)
            if new_store:
                write_tag(store.models_dir, model, store.manifest)
                shutil.rmtree(store.models_dir / "manifests")
        yield root / "models"


def demo_subject(models: Path) -> Subject:
    """Returns the demo model, of this store."""
    talks = [Talk.known(conversation) for conversation in CONVERSATIONS[:2]]
    return Subject(MODEL, models, talks, TURNS, GREEDY, CONVERSATIONS[2].prompt(0), END, KNOWN)


def seeing_subject(models: Path) -> Subject:
    """Returns the demo model that sees, of this store."""
    from scripts.tools.demo.seeing import TALKS  # draws its pictures

    turns = [(number, range(len(talk.questions))) for number, talk in enumerate(TALKS)]
    first = TALKS[0]
    return Subject(SEEING_MODEL, models, TALKS, turns, GREEDY, first.prompt(0), END, KNOWN, first.pictures[0])


def hearing_subject(models: Path) -> Subject:
    """Returns the demo model that hears, of this store."""
    from scripts.tools.demo.hearing import TALKS  # plays its sounds

    turns = [(number, range(len(talk.questions))) for number, talk in enumerate(TALKS)]
    first, shown = TALKS[0].prompt(0), TALKS[0].pictures[0]
    return Subject(HEARING_MODEL, models, TALKS, turns, GREEDY, first, END, KNOWN, shown, "audio")


def real_subject(directory: Path) -> Subject:
    """Returns the real model of this directory; its first answers are the expected ones."""
    talks = [Talk(title, questions, chat.render) for title, questions in REAL_QUESTIONS.items()]
    right = "Every answer without a cache was the one with it."
    options = GREEDY | {"num_predict": REAL_LENGTH}
    sample = chat.render([Message("user", "Hello")])
    return Subject(str(directory), None, talks, TURNS, options, sample, chat.END, right)
