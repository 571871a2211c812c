"""The towers for sound: what mlx-vlm makes of the same weights, in pieces, packed, under any name, and broken."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module

from runner.errors import ModelError
from runner.media.families import Gemma4Sound
from runner.media.towers import SoundTower, TowerPlan, load_tower, plan_sound_tower, plan_tower
from runner.media.towers.gemma4_sound import Gemma4SoundTower
from runner.model.architectures import is_needed
from runner.model.opened import OpenedModel
from tests.lib.kernels import mlx_own
from tests.model.media.towers.cases import opened_tower, peak_bytes
from tests.model.media.towers.gemma_cases import WIDTH, Config, Weights, distance, features, make_weights, parameters
from tests.model.media.towers.sound_cases import CASES, NAMES, RECORDED, SOUNDS, key, make_rows, make_tower

CLOSE = 1e-5
CONFORMERS = tuple(name for name in NAMES if CASES[name].tower is Gemma4SoundTower)


@pytest.mark.parametrize(("name", "count"), SOUNDS)
def test_features_are_those_of_mlx_vlm(name: str, count: int) -> None:
    recorded = cast("Weights", mx.load(str(RECORDED)))
    found = features(make_tower(name), make_rows(name, count), [count])
    assert found.shape[1] == make_tower(name).width == WIDTH
    assert distance(found, recorded[key(name, count)]) <= CLOSE
    if name in CONFORMERS:
        assert len(found) == Gemma4Sound().clip_of([count]).tokens


@pytest.mark.parametrize("name", NAMES)
def test_pieces_of_the_work_make_no_difference(name: str) -> None:
    count = max(CASES[name].counts)
    rows, tower = make_rows(name, count), make_tower(name)
    whole = list(tower.encode(rows, [count]))
    tower.piece_bytes = 4096
    cut = list(tower.encode(rows, [count]))
    assert distance(cut[-1], whole[-1]) <= CLOSE
    if name in CONFORMERS:
        assert len(cut) > len(whole) + 20


@pytest.mark.parametrize("name", NAMES)
def test_each_piece_of_a_sound_is_heard_by_itself(name: str) -> None:
    tower, lengths = make_tower(name), [7, 49, 52]
    rows = make_rows(name, sum(lengths))
    parts, at = [], 0
    for length in lengths:
        parts.append(features(tower, rows[at : at + length], [length]))
        at += length
    assert distance(features(tower, rows, lengths), mx.concatenate(parts)) <= CLOSE


@pytest.mark.parametrize("name", ["conformer", "unified"])
@pytest.mark.parametrize("lengths", [[300], [40, 300, 200]])
def test_memory_stays_below_the_estimate(name: str, lengths: list[int]) -> None:
    tower, rows = make_tower(name), make_rows(name, sum(lengths))
    for piece_bytes in (1 << 26, 1 << 14):
        tower.piece_bytes = piece_bytes
        mx.eval(rows)
        taken = peak_bytes(tower, lambda: features(tower, rows, lengths))
        assert taken <= tower.encode_bytes(lengths) <= 4 * taken


@pytest.mark.parametrize("name", ["conformer", "conformer-clamped", "unified"])
def test_sixteen_bits_stay_sixteen_bits(name: str) -> None:
    count, tower = CASES[name].counts[1], make_tower(name)
    rows = make_rows(name, count)
    exact = features(tower, rows, [count])
    tower.set_dtype(mx.bfloat16)
    arrays = list(tower.encode(rows, [count]))
    assert {array.dtype for array in arrays} == {mx.bfloat16}
    assert distance(arrays[-1].astype(mx.float32), exact) < 0.2


ARCHITECTURE = "Gemma4ForConditionalGeneration"


def published(name: str, weights: Mapping[str, mx.array]) -> Weights:
    """The weights under the names, and in the shapes, of Hugging Face."""
    found = {}
    for own, array in weights.items():
        stored = re.sub(r"\.linear\.(?=weight|scales|biases)", ".", own)
        root = "embed_audio." if own.startswith("embedding_projection") else "audio_tower."
        is_conv = ".conv.weight" in own or "depthwise" in own
        found[f"model.{root}{stored}"] = mx.contiguous(mx.moveaxis(array, -1, 1)) if is_conv else array
    assert name in NAMES
    return found


def opened(directory: Path, config: Config, weights: Mapping[str, mx.array]) -> OpenedModel:
    """A model with nothing but its tower for sound."""
    whole = {"architectures": [ARCHITECTURE], "model_type": "gemma4"} | config
    return opened_tower(directory, whole, weights or {"model.norm.weight": mx.zeros((4,))})


def planned(model: OpenedModel) -> TowerPlan[SoundTower]:
    plan = plan_sound_tower(model)
    assert plan is not None
    return plan


def case_weights(name: str) -> Weights:
    case = CASES[name]
    return make_weights(case.tower(case.config), clamped=case.clamped)


@pytest.mark.parametrize("name", ["conformer", "conformer-clamped", "unified"])
@pytest.mark.parametrize("root", ["model.", ""])
def test_a_tower_is_found_under_its_published_names(tmp_path: Path, name: str, root: str) -> None:
    weights = published(name, case_weights(name))
    assert not any(map(is_needed, weights)), "by the text model"
    stored = {root + each.removeprefix("model."): array for each, array in weights.items()}
    model = opened(tmp_path, CASES[name].config, stored)
    assert plan_tower(model) is None
    plan = planned(model)
    assert plan.fault == ""
    assert plan.blocks == (2 if name in CONFORMERS else 0)
    assert plan.nbytes == sum(array.nbytes for array in stored.values())
    count = CASES[name].counts[1]
    rows = make_rows(name, count)
    assert distance(features(load_tower(plan), rows, [count]), features(make_tower(name), rows, [count])) <= CLOSE


def test_a_convolution_may_have_channels_last(tmp_path: Path) -> None:
    weights = published("conformer", case_weights("conformer"))
    own = case_weights("conformer")
    for name in weights:
        if ".conv." in name or "depthwise" in name:
            weights[name] = own[name.removeprefix("model.audio_tower.")]
    tower, rows = load_tower(planned(opened(tmp_path, CASES["conformer"].config, weights))), make_rows("conformer", 52)
    assert distance(features(tower, rows, [52]), features(make_tower("conformer"), rows, [52])) <= CLOSE


@pytest.mark.parametrize("name", ["conformer-packed", "unified-packed"])
@mlx_own()
def test_packed_matrices_compute_what_plain_ones_do(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    stored: Weights = {}
    for own, array in case_weights(name).items():
        if array.ndim == 2 and array.shape[1] % 32 == 0:
            parts = mx.quantize(array, 32, case.bits)
            stem = own.removesuffix("weight")
            stored |= {f"{stem}{part}": each for part, each in zip(("weight", "scales", "biases"), parts, strict=True)}
        else:
            stored[own] = array
    packing = {"quantization": {"group_size": 32, "bits": case.bits}}
    tower = load_tower(planned(opened(tmp_path, case.config | packing, published(name, stored))))
    assert sum(each.endswith(".scales") for each in parameters(tower)) > (20 if name in CONFORMERS else 0)
    (count,) = case.counts
    recorded = cast("Weights", mx.load(str(RECORDED)))[key(name, count)]
    assert distance(features(tower, make_rows(name, count), [count]), recorded) <= CLOSE


def test_a_linear_has_four_bounds_or_none(tmp_path: Path) -> None:
    weights = published("conformer-clamped", case_weights("conformer-clamped"))
    linear = "model.audio_tower.layers.1.lconv1d.linear_start"
    config = CASES["conformer-clamped"].config
    without = {name: array for name, array in weights.items() if not re.match(rf"{linear}\.\w+_m", name)}
    tower = cast("Gemma4SoundTower", load_tower(planned(opened(tmp_path / "none", config, without))))
    assert "input_min" not in tower.layers[1].lconv1d.linear_start
    assert "input_min" in tower.layers[0].lconv1d.linear_start
    del weights[f"{linear}.output_max"]
    fault = planned(opened(tmp_path / "three", config, weights)).fault
    assert fault.endswith("weight layers.1.lconv1d.linear_start has a partial clamp set")


@pytest.mark.parametrize(
    ("lost", "fault"),
    [
        ("audio_tower.layers.1.norm_out.weight", "missing audio weight: layers.1.norm_out.weight"),
        ("audio_tower.layers.0.self_attn.post.weight", "missing audio weight: layers.0.self_attn.post.weight"),
        ("audio_tower.output_proj.bias", "missing audio weight: output_proj.bias"),
        ("embed_audio.embedding_projection.weight", "missing weight: embed_audio.embedding_projection.weight"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, lost: str, fault: str) -> None:
    weights = published("conformer", case_weights("conformer"))
    del weights[f"model.{lost}"]
    plan = planned(opened(tmp_path, CASES["conformer"].config, weights))
    assert (plan.fault, plan.unknown, plan.nbytes) == (fault, False, 0)
    with pytest.raises(ModelError, match=re.escape(fault)):
        load_tower(plan)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("conformer", "config declares a gemma4_audio tower but audio_tower weights are missing from the manifest"),
        (
            "unified",
            "config declares a gemma4_unified_audio embedder but embed_audio weights are missing from the manifest",
        ),
    ],
)
def test_a_description_without_tensors_and_tensors_without_a_description(tmp_path: Path, name: str, fault: str) -> None:
    assert planned(opened(tmp_path / "none", CASES[name].config, {})).fault == fault
    text: Config = {"text_config": {"hidden_size": WIDTH}}
    if name in CONFORMERS:
        weights = published(name, case_weights(name))
        fault = planned(opened(tmp_path / "undescribed", text, weights)).fault
        assert fault == "the model has tensors of a sound tower, but config.json has no audio_config"
    assert plan_sound_tower(opened(tmp_path / "text", text, {})) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "32"}, "hidden_size"),
        ({"num_attention_heads": 5}, "5 heads must divide 32"),
        ({"num_hidden_layers": 1 << 19}, "num_hidden_layers: want at most 1024, found"),
        ({"hidden_act": "gelu"}, "hidden_act: want 'silu', found 'gelu'"),
        ({"subsampling_conv_channels": [8]}, "subsampling_conv_channels: want two numbers"),
        ({"attention_context_left": 1}, "attention_context_left: want 2 or more"),
        ({"attention_logit_cap": float("nan")}, "attention_logit_cap: want a positive number"),
    ],
)
def test_a_description_that_cannot_be_meant_is_refused(changes: Config, message: str) -> None:
    case = CASES["conformer"]
    with pytest.raises(ModelError, match=message):
        case.tower({**case.config, "audio_config": {**case.audio, **changes}})


def test_another_layer_of_the_tower_is_not_left_out(tmp_path: Path) -> None:
    weights = published("conformer", case_weights("conformer"))
    fewer = {**CASES["conformer"].audio, "num_hidden_layers": 1}
    plan = planned(opened(tmp_path, {**CASES["conformer"].config, "audio_config": fewer}, weights))
    assert "config.json describes fewer blocks" in plan.fault
    assert isinstance(make_tower("conformer"), Module)
