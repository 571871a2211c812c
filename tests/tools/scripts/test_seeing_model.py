"""The committed model that sees: what its files hold, and that its answers come from the pictures.

Its weights are loaded here by mlx-lm's own class and the tower, and a plain loop asks it: no code of the engine takes
part, so a wrong answer of the runner is the engine's.
"""

import json
import random
from pathlib import Path

import mlx.core as mx
import pytest
from tokenizers import Tokenizer

from runner.model import open_model
from runner.model.towers import plan_tower
from scripts.tools.demo import seeing, training
from scripts.tools.demo.plain import (
    REQUIRED_ACCURACY,
    SOFT,
    START,
    STOP,
    Viewer,
    load_seeing,
    new_seeing,
    weights_path,
    wrong_answers,
)
from scripts.tools.demo.questions import END, MARKERS, Talk, Turn, messages, render
from scripts.tools.demo.seeing import (
    BLIND,
    BLUE,
    PICTURES,
    QUESTIONS,
    RED,
    SIZES,
    SMALL_TALK,
    TALKS,
    Drawing,
    Scene,
    draw,
    held_out_looks,
    png,
    which,
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


def test_the_whole_directory_fits_in_four_megabytes() -> None:
    files = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert files.keys() == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= 4_000_000


def test_every_weight_has_sixteen_bits() -> None:
    weights = mx.load(str(weights_path(MODEL)))
    assert isinstance(weights, dict)
    assert {weight.dtype for weight in weights.values()} == {mx.float16}
    assert weights["model.visual.patch_embed.proj.weight"].shape[1:] == (3, 2, 16, 16)  # as it is published


def test_the_runner_finds_a_tower_without_a_fault() -> None:
    plan = plan_tower(open_model(str(MODEL), Path("unused")))
    assert plan is not None
    assert (plan.fault, plan.blocks) == ("", 2)


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


def test_a_sample_of_the_held_out_pictures_is_named(viewer: Viewer) -> None:
    looks = held_out_looks(25)
    assert len(wrong_answers(viewer.answer, looks)) <= (1 - REQUIRED_ACCURACY) * len(looks)


@pytest.mark.slow
def test_the_held_out_pictures_are_named(viewer: Viewer) -> None:
    looks = held_out_looks()
    assert len(wrong_answers(viewer.answer, looks)) <= (1 - REQUIRED_ACCURACY) * len(looks)


def test_small_talk_needs_no_picture(viewer: Viewer) -> None:
    assert {question: viewer.answer(asked(question)) for question in SMALL_TALK} == SMALL_TALK


@pytest.mark.parametrize("question", QUESTIONS)
def test_without_its_picture_a_question_has_no_answer(viewer: Viewer, question: str) -> None:
    assert viewer.answer(asked(question)) == BLIND


@pytest.mark.parametrize("question", QUESTIONS)
def test_another_picture_gets_another_answer(viewer: Viewer, question: str) -> None:
    answers = [viewer.answer(asked(f"[img-0]{question}"), [PICTURES[scene]]) for scene in (RED, BLUE)]
    assert answers == [QUESTIONS[question](scene) for scene in (RED, BLUE)]
    assert answers[0] != answers[1]


def test_the_answer_goes_by_the_picture_and_not_by_the_answers_before(viewer: Viewer) -> None:
    turn = Turn(ONE, RED.sentence)
    assert viewer.answer(render(messages([turn], "Where is the circle?")), [PICTURES[BLUE]]) != QUESTIONS[
        "Where is the circle?"
    ](RED)


@pytest.mark.parametrize("number", [0, 1])
def test_two_pictures_that_change_places_change_their_answers(viewer: Viewer, number: int) -> None:
    question = asked(f"[img-0][img-1]{which(number)}")
    pair = [PICTURES[RED], PICTURES[BLUE]]
    assert viewer.answer(question, pair) == (RED, BLUE)[number].sentence
    assert viewer.answer(question, pair[::-1]) == (BLUE, RED)[number].sentence


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_pictures_of_all_forms_are_seen(viewer: Viewer, size: tuple[int, int]) -> None:
    for number, scene in enumerate((Scene("green", "at the bottom left"), Scene("yellow", "at the top right"))):
        assert viewer.answer(asked(ONE), [png(scene, 501 + 2 * number, size)]) == scene.sentence


# --- that the questions ask for what they should


def test_training_never_shows_a_held_out_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    seeds: list[int] = []

    def noted(scene: Scene, seed: int, size: tuple[int, int]) -> Drawing:
        seeds.append(seed)
        return draw(scene, seed, size)

    monkeypatch.setattr(seeing, "draw", noted)
    shown = training.gallery(new_seeing(config).family, 100, seed=5)
    trained = set(seeds)
    seeds.clear()
    held_out_looks(50)
    assert len(trained) == 100
    assert len(seeds) == 100
    assert not trained & {*seeds}
    assert not any(seed % 2 for seed in trained)
    assert all(seed % 2 for seed in seeds)
    assert len({exhibit.scene for exhibit in shown}) > 25


# --- that it can be made again


def test_it_is_trained_from_nothing_and_by_its_seed_alone(tmp_path: Path) -> None:
    for name in ("once", "again"):
        weights = training.train_seeing(MODEL, tower_steps=2, steps=1, seed=1, pictures=24)
        training.save(MODEL, tmp_path / name, weights)
    once, again = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("once", "again"))
    assert once == again
    committed = {path.name: path.read_bytes() for path in MODEL.iterdir()}
    assert {name for name in committed if committed[name] != once[name]} == {"model.safetensors"}
    trained, made = (mx.load(str(weights_path(directory))) for directory in (tmp_path / "once", MODEL))
    assert isinstance(trained, dict)
    assert isinstance(made, dict)
    assert {name: (each.shape, each.dtype) for name, each in trained.items()} == {
        name: (each.shape, each.dtype) for name, each in made.items()
    }
    plan = plan_tower(open_model(str(tmp_path / "once"), Path("unused")))
    assert plan is not None
    assert plan.fault == ""
    assert isinstance(Viewer(*load_seeing(tmp_path / "once")).answer(asked(ONE), [PICTURES[RED]], limit=2), str)


def test_batches_turn_and_embed_as_the_runner_does() -> None:
    """A prompt with pictures gets the same logits in a batch of the training as from the runner's forward."""
    model, tokenizer = load_seeing(MODEL)
    viewer = Viewer(model, tokenizer)
    exhibits = training.gallery(model.family, 2, seed=3)
    seen = [training.Seen(each, [*model.tower.encode(each.patches, each.grid)][-1]) for each in exhibits]
    rows = [training.seeing_row(random.Random(seed), tokenizer, seen) for seed in range(4)]
    batch = training.Batch.of(rows, max(len(row.tokens) for row in rows))
    _, right = batch.loss(training.seeing_logits(model, batch))
    assert bool(right > 0.98)  # the committed model says what it is trained on
    assert viewer.answer(asked(ONE), [PICTURES[RED]]) == RED.sentence
