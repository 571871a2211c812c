"""Towers are found, checked from headers alone, and read: in every spelling, layout and packing that stores have."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import pytest

from runner.errors import ModelError
from runner.media.towers import Tower, TowerPlan, load_tower, plan_tower
from runner.model.architectures import is_needed
from runner.model.opened import OpenedModel
from scripts.tools.models.tensors import PACKINGS, rounded
from tests.lib.kernels import mlx_own
from tests.model.loading.conftest import parameters
from tests.model.media.towers.cases import NEMOTRON, QWEN, Case, features, made, opened_tower, reopened, vision

QWEN_ODD, NEMOTRON_ODD = QWEN[3], NEMOTRON[4]
BOTH = pytest.mark.parametrize("case", [QWEN_ODD, NEMOTRON_ODD], ids=lambda case: case.name)
_ARCHITECTURES = {"qwen": "Qwen3_5ForConditionalGeneration", "nemotron": "NemotronH_Nano_Omni_Reasoning_V3"}


def opened(
    directory: Path, case: Case, weights: Mapping[str, mx.array] | None = None, **changes: object
) -> OpenedModel:
    """A model with nothing but its tower; `changes` are of its config, None takes a field away."""
    architecture = _ARCHITECTURES[case.name.split("-")[0]]
    config = {**case.config, "architectures": [architecture], **changes}
    config = {key: value for key, value in config.items() if value is not None}
    return opened_tower(directory, config, case.weights if weights is None else weights)


def planned(model: OpenedModel) -> TowerPlan[Tower]:
    plan = plan_tower(model)
    assert plan is not None
    return plan


def fault(model: OpenedModel) -> str:
    plan = planned(model)
    assert plan.fault
    assert plan.nbytes == 0
    with pytest.raises(ModelError, match=re.escape(plan.fault)):
        load_tower(plan)
    return plan.fault


def loaded(model: OpenedModel, dtype: str = "keep") -> Tower:
    plan = planned(model)
    assert not plan.fault
    return load_tower(plan, dtype)


def same(left: mx.array, right: mx.array, tolerance: float = 0.0) -> bool:
    return left.shape == right.shape and bool(mx.abs(left - right).max() <= tolerance * mx.abs(right).max())


def renamed(weights: Mapping[str, mx.array], pattern: str, replacement: str) -> dict[str, mx.array]:
    return {re.sub(pattern, replacement, name): array for name, array in weights.items()}


@pytest.mark.parametrize("root", ["visual.", "vision_tower."])
def test_every_root_of_a_qwen_tower(tmp_path: Path, root: str) -> None:
    weights = renamed(QWEN_ODD.weights, r"^model\.visual\.", root)
    assert same(features(loaded(opened(tmp_path, QWEN_ODD, weights)), QWEN_ODD), features(made(QWEN_ODD), QWEN_ODD))


@pytest.mark.parametrize(("root", "projector"), [("", "mlp1.layers."), ("model.", "mlp1.")])
def test_every_root_of_a_radio_tower(tmp_path: Path, root: str, projector: str) -> None:
    weights = renamed(renamed(NEMOTRON_ODD.weights, r"^mlp1\.", projector), "^", root)
    tower = loaded(opened(tmp_path, NEMOTRON_ODD, weights))
    assert same(features(tower, NEMOTRON_ODD), features(made(NEMOTRON_ODD), NEMOTRON_ODD))


@pytest.mark.parametrize("root", ["vision_projector.", "model."])
def test_every_root_of_the_last_norm(tmp_path: Path, root: str) -> None:
    case = next(case for case in NEMOTRON if "vision_final_layernorm" in case.config)
    weights = renamed(case.weights, r"^vision_projector\.", root)
    assert not any(is_needed(name) for name in weights)  # by the text model
    tower = loaded(opened(tmp_path, case, weights, vision_final_layernorm=None))
    assert same(features(tower, case), features(made(case), case))


def test_a_convolution_may_have_channels_last(tmp_path: Path) -> None:
    weights = QWEN_ODD.weights
    name = "model.visual.patch_embed.proj.weight"
    weights[name] = mx.contiguous(weights[name].transpose(0, 2, 3, 4, 1))
    assert same(features(loaded(opened(tmp_path, QWEN_ODD, weights)), QWEN_ODD), features(made(QWEN_ODD), QWEN_ODD))


def packed(weights: Mapping[str, mx.array], kind: str) -> tuple[dict[str, mx.array], dict[str, mx.array], int]:
    """Weights with every matrix that can be packed as MLX's converter packs it, the same as plain numbers, a count."""
    words, plain, count = dict(weights), dict(weights), 0
    packing = PACKINGS[kind]
    for name, array in weights.items():
        if (
            array.ndim == 2
            and name.endswith(".weight")
            and "video" not in name
            and array.shape[1] % packing.group_size == 0
        ):
            parts = mx.quantize(array, packing.group_size, packing.bits, mode=packing.mode)
            stem = name.removesuffix("weight")
            words |= {f"{stem}{part}": each for part, each in zip(("weight", "scales", "biases"), parts, strict=False)}
            plain[name] = rounded(array, packing)
            count += 1
    return words, plain, count


@pytest.mark.parametrize(
    ("case", "kind"), [(QWEN_ODD, "int4"), (QWEN_ODD, "mxfp8"), (NEMOTRON_ODD, "nvfp4"), (NEMOTRON_ODD, "int8")]
)
@mlx_own()
def test_packed_matrices_compute_what_plain_ones_do(tmp_path: Path, case: Case, kind: str) -> None:
    words, plain, count = packed(case.weights, kind)
    assert count >= 10
    tower = loaded(opened(tmp_path, case, words), "keep")
    assert sum(name.endswith(".scales") for name in parameters(tower)) == count
    assert same(features(tower, case), features(made(case, plain), case), 1e-5)


@BOTH
def test_only_what_the_tower_needs_is_read(tmp_path: Path, case: Case) -> None:
    extra = {"model.visual.rotary_pos_emb.inv_freq": mx.zeros((4,)), "mlp1.2.weight": mx.zeros((4,))}
    plan = planned(opened(tmp_path, case, {**case.weights, **extra}))
    unused = ("video_embedder", "summary_idxs", "input_conditioner")
    needed = [array.nbytes for name, array in case.weights.items() if not any(part in name for part in unused)]
    assert plan.fault == ""
    assert plan.nbytes == sum(needed)
    assert plan.blocks == 2


@BOTH
def test_a_missing_tensor_is_named(tmp_path: Path, case: Case) -> None:
    needed = planned(opened(tmp_path / "whole", case)).opened.tensors
    sample = [*list(needed)[:2], *list(needed)[-2:]]
    kind = planned(reopened(tmp_path / "whole")).kind
    for number, name in enumerate(sample):
        weights = {key: array for key, array in case.weights.items() if kind.parameter_name(key) != name}
        found = fault(opened(tmp_path / str(number), case, weights))
        assert name in found
        assert "tower lacks 1 tensors" in found


@BOTH
def test_a_tensor_of_another_shape_or_type_is_named(tmp_path: Path, case: Case) -> None:
    name = next(name for name in case.shapes if name.endswith("blocks.0.attn.proj.weight"))
    wide = {**case.weights, name: mx.zeros((64, 65))}
    assert "tensor blocks.0.attn.proj.weight: want shape [64, 64], found [64, 65]" in fault(
        opened(tmp_path / "wide", case, wide)
    )
    whole = {**case.weights, name: mx.zeros((64, 64), mx.int32)}
    assert "tensor blocks.0.attn.proj.weight: want a floating-point type" in fault(
        opened(tmp_path / "whole", case, whole)
    )


def test_two_spellings_of_one_tensor_are_a_fault(tmp_path: Path) -> None:
    """Ollama's runner takes those of one spelling."""
    weights = {**QWEN_ODD.weights, "visual.merger.norm.bias": mx.zeros((64,))}
    assert "model.visual.merger.norm.bias and visual.merger.norm.bias" in fault(opened(tmp_path, QWEN_ODD, weights))


@BOTH
def test_a_tower_has_tensors_and_a_description_or_neither(tmp_path: Path, case: Case) -> None:
    undescribed = opened(tmp_path / "undescribed", case, vision_config=None)
    assert fault(undescribed) == "the model has tensors of a vision tower, but config.json has no vision_config"
    text = {"model.norm.weight": mx.zeros((4,))}
    empty = opened(tmp_path / "empty", case, text)
    assert fault(empty) == "config.json describes a vision tower, but none of its tensors is in the model"
    assert plan_tower(opened(tmp_path / "text", case, text, vision_config=None)) is None


@pytest.mark.parametrize(
    ("case", "changes", "said", "unknown"),
    [
        (QWEN_ODD, {"deepstack_visual_indexes": [1]}, "unsupported deepstack_visual_indexes [1]", False),
        (QWEN_ODD, {"depth": 0}, "config.json: depth: want a positive integer, found 0", False),
        (QWEN_ODD, {"depth": 1}, "config.json describes fewer blocks", True),
        (QWEN_ODD, {"hidden_size": 1 << 40}, "hidden_size: want a positive integer", False),
        (QWEN_ODD, {"num_heads": 32}, "width (64) must be divisible by its 32 heads times 4", False),
        (QWEN_ODD, {"num_position_embeddings": 50}, "num_position_embeddings (50) must be a square", False),
        (QWEN_ODD, {"num_position_embeddings": None}, "num_position_embeddings", False),
        (QWEN_ODD, {"out_hidden_size": 32}, "out_hidden_size (32) is not the text model's hidden_size (64)", False),
        (QWEN_ODD, {"in_channels": 4}, "4 channels", False),
        (QWEN_ODD, {"patch_size": True}, "patch_size: want a positive integer, found True", False),
        (NEMOTRON_ODD, {"version": "radio_v3"}, "unsupported RADIO version 'radio_v3'", True),
        (NEMOTRON_ODD, {"patch_size": 14}, "unsupported RADIO patch_size 14", True),
        (NEMOTRON_ODD, {"hidden_size": "wide"}, "hidden_size", False),
        (NEMOTRON_ODD, {"num_attention_heads": 3}, "width (64) must be divisible by its 3 heads", False),
        (NEMOTRON_ODD, {"num_hidden_layers": 1}, "config.json describes fewer blocks", True),
    ],
)
def test_nonsense_in_the_description_is_a_fault_that_another_runner_may_not_find(
    tmp_path: Path, case: Case, changes: dict[str, object], said: str, unknown: bool
) -> None:
    model = opened(tmp_path, case, vision_config={**vision(case), **changes})
    assert said in fault(model)
    assert planned(model).unknown is unknown


@pytest.mark.parametrize("told", [None, 7, "wide"])
def test_qwen_takes_the_width_inside_from_the_tensors(tmp_path: Path, told: object) -> None:
    tower = loaded(opened(tmp_path, QWEN_ODD, vision_config={**vision(QWEN_ODD), "intermediate_size": told}))
    assert same(features(tower, QWEN_ODD), features(made(QWEN_ODD), QWEN_ODD))
    assert tower.encode_bytes(QWEN_ODD.grid) == made(QWEN_ODD).encode_bytes(QWEN_ODD.grid)


@pytest.mark.parametrize("lost", [".norm1.weight", "norm.weight", "visual.", "radio_model."])
@BOTH
def test_a_tower_that_lacks_tensors_is_not_an_unknown_one(tmp_path: Path, case: Case, lost: str) -> None:
    weights = {name: array for name, array in case.weights.items() if lost not in name}
    plan = plan_tower(opened(tmp_path, case, {"model.norm.weight": mx.zeros((4,)), **weights}))
    assert plan is not None
    assert (bool(plan.fault), plan.unknown) == (len(weights) < len(case.weights), False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"norm_mean": [0.5]}, "norm_mean must contain 3 numbers"),
        ({"norm_std": [1, 0, 1]}, "norm_std must not contain 0"),
        ({"downsample_ratio": 0.25}, "unsupported downsample_ratio 0.25"),
        ({"downsample_ratio": float("nan")}, "unsupported downsample_ratio nan"),
        ({"patch_size": 14}, "unsupported RADIO patch_size 14"),
    ],
)
def test_nonsense_around_a_radio_tower_is_a_fault(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    assert said in fault(opened(tmp_path, NEMOTRON_ODD, None, **changes))


def test_the_preprocessor_overrides_colours(tmp_path: Path) -> None:
    other = next(case for case in NEMOTRON if case.name.endswith("other-colours"))
    colours = {key: other.config[key] for key in ("norm_mean", "norm_std")}
    opened(tmp_path, NEMOTRON_ODD)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(colours))
    wanted = features(made(NEMOTRON_ODD._replace(config={**NEMOTRON_ODD.config, **colours})), NEMOTRON_ODD)
    assert same(features(loaded(reopened(tmp_path)), NEMOTRON_ODD), wanted)
    assert not same(wanted, features(made(NEMOTRON_ODD), NEMOTRON_ODD), 0.01)


def test_a_broken_preprocessor_is_a_fault(tmp_path: Path) -> None:
    opened(tmp_path, NEMOTRON_ODD)
    (tmp_path / "preprocessor_config.json").write_text("[]")
    assert fault(reopened(tmp_path)).startswith("preprocessor_config.json")


def test_what_the_text_model_packs_is_not_asked_of_the_tower(tmp_path: Path) -> None:
    packing = {"quant_method": "bitnet"}
    tower = loaded(opened(tmp_path, QWEN_ODD, quantize_activations=True, quantization_config=packing))
    assert same(features(tower, QWEN_ODD), features(made(QWEN_ODD), QWEN_ODD))


def test_a_file_that_shrinks_after_planning_is_noticed_before_mlx_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a lazy read that failed MLX may wait for ever, and the runner goes on without a tower."""
    plan = planned(opened(tmp_path, QWEN_ODD))
    monkeypatch.setattr(mx, "load", lambda *_, **__: pytest.fail("MLX reads it"))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="truncated"):
        load_tower(plan)


def test_an_unreadable_file_is_a_fault(tmp_path: Path) -> None:
    lost = "model.visual.merger.norm.weight"
    opened(tmp_path, QWEN_ODD, {name: array for name, array in QWEN_ODD.weights.items() if name != lost})
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"broken")
    places = {name: f"model-0000{1 + (name == lost)}-of-00002.safetensors" for name in QWEN_ODD.shapes}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert fault(reopened(tmp_path)) == "tensor merger.norm.weight of the vision tower cannot be read"


@BOTH
def test_tensors_of_odd_ranks_are_a_fault(tmp_path: Path, case: Case) -> None:
    """Ranks take turns over the first tensors, and over those that other code reads."""
    names = list(planned(opened(tmp_path / "whole", case)).opened.tensors)
    read_otherwise = {"class_tokens", "positions", "patch_embed.weight"}
    for number, name in enumerate(sorted({*names[:3], *read_otherwise.intersection(names)})):
        stored = next(key for key in case.shapes if made(case).parameter_name(key) == name)
        shape = ((), (3,), (1, 2, 3, 4, 5, 6))[number % 3]
        assert name in fault(opened(tmp_path / str(number), case, {**case.weights, stored: mx.zeros(shape)}))
