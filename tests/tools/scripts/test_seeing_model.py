"""The committed model that sees: what its files hold, and that its answers come from the pictures.

Its weights are loaded here by mlx-lm's own class and the tower, and a plain loop asks it: no code of the engine takes
part, so a wrong answer of the runner is the engine's.
"""

import json

import pytest
from tokenizers import Tokenizer

from scripts.tools.demo.plain import (
    SOFT,
    START,
    STOP,
    Viewer,
    load_seeing,
)
from scripts.tools.demo.questions import END, MARKERS, Talk, messages, render
from scripts.tools.demo.seeing import (
    TALKS,
)
from scripts.tools.demo.subjects import SEEING_WEIGHTS as MODEL

ONE = "[img-0]What do you see?"


@pytest.fixture(scope="module")
def viewer() -> Viewer:
    return Viewer(*load_seeing(MODEL))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def asked(question: str) -> str:
    """The prompt of a chat that is one question."""
    return render(messages([], question))


# --- its files


def test_the_tokens_around_pictures_are_special_and_named_in_the_config(tokenizer: Tokenizer) -> None:
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    names = {"vision_start_token_id": START, "image_token_id": SOFT, "vision_end_token_id": STOP, "eos_token_id": END}
    assert {name: config[name] for name in names} == {
        name: tokenizer.token_to_id(token) for name, token in names.items()
    }
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    assert added == dict.fromkeys([*MARKERS.values(), *names.values()], True)
    for marker in added:
        assert tokenizer.encode(f"red{marker}blue", add_special_tokens=False).tokens.count(marker) == 1


# --- what it answers


@pytest.mark.parametrize("talk", TALKS, ids=lambda talk: talk.title)
def test_the_talks_of_the_demo_are_answered(viewer: Viewer, talk: Talk) -> None:
    answers = [viewer.answer(talk.prompt(turn), talk.pictures) for turn in range(len(talk.questions))]
    assert answers == talk.answers
