"""A model gets its sight with its weights; whatever is wrong with a tower costs pictures, and never text."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import msgspec
import pytest

from runner.engine.parts import Parts
from runner.engine.ports import NoVision
from runner.media.encoder import OwnTowers
from runner.media.header import AUDIO, IMAGE
from runner.media.open import Sight, open_sight
from runner.media.row_store import FamilyPictures, Pictures
from runner.media.support import MediaSupport
from runner.model import open_model
from runner.model.weights.loading import load
from runner.settings import Settings
from runner.tokenizer import open_tokenizer
from scripts.tools.models.checkpoints import TOKENIZER
from scripts.tools.models.sources import write_source
from scripts.tools.models.tokenizers import with_tokens, write_tokenizer
from tests.lib.seeing import BOTH_WAYS, HEARS, NAMES, SOUND, SOUND_END, SOUND_START

QWEN = "qwen3.5-seeing"
SETTINGS = Settings(
    model="tiny", port=0, models_dir=Path("unused"), cache="trie", blas="auto", blas_threads=None,
    log_level=20, watch_parent=False,
)  # fmt: skip


def sight_of(directory: Path, settings: Settings = SETTINGS, budget_bytes: int = 1 << 30) -> Sight:
    opened = open_model(str(directory), Path("unused"))
    loaded = load(opened)
    text = loaded.logits(mx.array([[3, 4, 5]]), loaded.make_layers())
    assert bool(mx.isfinite(text).all())
    tokenizer = open_tokenizer(opened.file)
    most = budget_bytes + mx.get_active_memory()
    parts = Parts(settings, opened, lambda _: None, on_cpu=True, total_bytes=most, budget_bytes=most)
    parts.loaded, parts.tokenizer = loaded, tokenizer
    return open_sight(parts)


def ids_of(pictures: Pictures | None) -> tuple[int, int, int]:
    assert isinstance(pictures, FamilyPictures)
    return pictures.start, pictures.soft, pictures.end


def changed(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a model's config."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def blind(directory: Path, caplog: pytest.LogCaptureFixture, settings: Settings = SETTINGS) -> str:
    """Returns why a model sees nothing, of which the log tells too."""
    with caplog.at_level(logging.WARNING):
        sight = sight_of(directory, settings)
    assert (sight.support, sight.encoder) == (None, None)
    parts = cast("Parts", SimpleNamespace())
    sight.plug(parts)
    assert parts.vision == NoVision(sight.why)
    return sight.why


@pytest.mark.parametrize("name", NAMES)
def test_a_model_with_a_tower_sees(tmp_path: Path, name: str) -> None:
    sight = sight_of(write_source(tmp_path / "tiny", name))
    assert isinstance(sight.support, MediaSupport)
    assert isinstance(sight.support.pictures, FamilyPictures)
    start, end = (5, 6) if name.startswith(("glimmer", "nemotron")) else (60, 61)
    assert ids_of(sight.support.pictures) == (start, 62, end)
    assert sight.support.pictures.family.bidirectional is (name in BOTH_WAYS)
    assert sight.encoder is not None
    assert sight.encoder.splits is not sight.support.pictures.family.bidirectional
    assert sight.encoder.nbytes == 0


@pytest.mark.parametrize(
    ("name", "start", "end"),
    [("glimmer-seeing", "<|image_start|>", "<|image_end|>"), ("nemotron-omni-seeing", "<img>", "</img>")],
)
def test_tokens_that_a_config_only_spells_are_the_tokenizers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, start: str, end: str
) -> None:
    directory = write_source(tmp_path / "tiny", name)
    for tokens in ({start: 7, end: 8}, {start: 7}, {end: 8}):
        write_tokenizer(directory, with_tokens(TOKENIZER, tokens))
        if len(tokens) == 2:
            sight = sight_of(directory)
            assert isinstance(sight.support, MediaSupport)
            assert ids_of(sight.support.pictures) == (7, 62, 8)
        else:
            missing = end if start in tokens else start
            assert blind(directory, caplog) == (
                f"its vision is unavailable: the tokenizer has no token {missing!r}, which stands for pictures"
            )


def test_a_text_model_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert blind(write_source(tmp_path / "tiny", "qwen3.5-text"), caplog) == ""
    assert not [record for record in caplog.records if "sees" in record.message]


def test_no_media_leaves_the_tower_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write_source(tmp_path / "tiny", QWEN)
    why = blind(directory, caplog, msgspec.structs.replace(SETTINGS, no_media=True))
    assert why == "the runner was started with --no-media"


def without_tensors(part: str) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        path = directory / "model.safetensors"
        weights = mx.load(str(path))
        assert isinstance(weights, dict)
        mx.eval(weights)
        mx.save_safetensors(str(path), {name: array for name, array in weights.items() if part not in name})

    return spoil


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (without_tensors("merger.norm.bias"), "merger.norm.bias"),
        (lambda at: changed(at, lambda config: config.pop("image_token_id")), "image_token_id"),
        (
            lambda at: changed(
                at, lambda config: config["text_config"]["rope_parameters"].update(mrope_section=[1, 2])
            ),
            "mrope_section",
        ),
    ],
    ids=["tensor", "token", "sections"],
)
def test_a_broken_tower_costs_pictures_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], object], why: str
) -> None:
    directory = write_source(tmp_path / "tiny", QWEN)
    spoil(directory)
    found = blind(directory, caplog)
    assert found.startswith("its vision is unavailable: ")
    assert why in found
    assert [record.message for record in caplog.records if "sees" in record.message] == ["the model sees no pictures"]


@pytest.mark.parametrize("name", HEARS)
def test_a_model_with_both_towers_sees_and_hears(tmp_path: Path, name: str) -> None:
    sight = sight_of(write_source(tmp_path / "tiny", name))
    assert sight.support is not None
    assert sight.support.pictures is not None
    assert sight.support.hearing is not None
    assert sight.support.hearing[1:] == (SOUND_START, SOUND, SOUND_END)
    assert sight.support.refusals == {}
    assert sight.encoder is not None
    assert isinstance(sight.encoder.towers, OwnTowers)
    assert sight.encoder.towers.sound_tower is not None
    assert sight.encoder.towers.tower is not None


TOLD = {AUDIO: ["the model hears nothing"], IMAGE: ["the model sees no pictures"]}


@pytest.mark.parametrize(
    ("spoil", "kind", "why"),
    [
        (without_tensors("norm_out"), AUDIO, "missing audio weight: layers.0.norm_out.weight"),
        (without_tensors("audio"), AUDIO, "gemma4_audio tower but audio_tower weights are missing from the manifest"),
        (lambda at: changed(at, lambda config: config.pop("boa_token_id")), AUDIO, "boa_token"),
        (without_tensors("no such tensor"), "", ""),
        (without_tensors("input_proj.weight"), IMAGE, "input_proj.weight"),
    ],
    ids=["tensor", "tensors", "token", "nothing", "picture"],
)
def test_a_broken_tower_costs_its_kind_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None], kind: str, why: str
) -> None:
    directory = write_source(tmp_path / "tiny", "gemma4-hearing")
    spoil(directory)
    with caplog.at_level(logging.WARNING):
        sight = sight_of(directory)
    assert sight.support is not None
    assert (sight.support.pictures is None, sight.support.hearing is None) == (kind == IMAGE, kind == AUDIO)
    assert list(sight.support.refusals) == ([kind] if kind else [])
    assert [record.message for record in caplog.records] == TOLD.get(kind, [])
    if kind:
        text = sight.support.refusals[kind]
        assert text.startswith(f"this model does not support {kind} input: its ")
        assert why in text


def test_a_gemma_without_the_tower_refuses_sound_as_ollama_does(tmp_path: Path) -> None:
    directory = write_source(tmp_path / "tiny", "gemma4-hearing")
    without_tensors("audio")(directory)
    changed(directory, lambda config: config.pop("audio_config"))
    sight = sight_of(directory)
    assert sight.support is not None
    assert sight.support.refusals == {AUDIO: "this model does not support audio input"}
    without_tensors("vision")(directory)
    changed(directory, lambda config: config.pop("vision_config"))
    assert sight_of(directory).support is None


def test_a_gemma_may_hear_and_not_see(tmp_path: Path) -> None:
    directory = write_source(tmp_path / "tiny", "gemma4-hearing")
    without_tensors("vision")(directory)
    changed(directory, lambda config: config.pop("vision_config"))
    sight = sight_of(directory)
    assert sight.support is not None
    assert sight.support.pictures is None
    assert sight.support.hearing is not None
    assert sight.support.refusals == {IMAGE: "this model does not support image input"}
