"""Packed weights on CPUs: layers that are unpacked compute the same, and never take more than the budget."""

import logging
from pathlib import Path
from typing import get_args

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module

from runner.commands.check.facts import inspect
from runner.model import OpenedModel, open_model
from runner.model.weights import dtype as dtype_module
from runner.model.weights.assemble import rehearse
from runner.model.weights.dtype import packed_layers, plan_dtypes
from runner.model.weights.load import load
from runner.settings import CACHE_PERCENT, CheckSettings
from scripts.tools.models.checkpoints import config_of, make_weights, write_directory
from scripts.tools.models.sources import Published
from scripts.tools.models.store import write_store
from scripts.tools.models.tensors import Quantization
from tests.lib.memory import held_bytes
from tests.model.loading.conftest import Checkpoints, parameters
from tests.model.loading.stored import put

TYPES: tuple[Quantization, ...] = get_args(Quantization)
PLENTY = 1 << 40


def paths(module: Module) -> list[str]:
    return [each.path for each in packed_layers(module)]


@pytest.fixture
def opened(checkpoint: Checkpoints, tmp_path: Path) -> OpenedModel:
    write_store(tmp_path, "m", checkpoint("llama", "bfloat16"), "int4")
    return open_model("m", tmp_path)


def test_as_many_layers_are_unpacked_as_fit(opened: OpenedModel) -> None:
    rehearsed, _ = rehearse(opened)
    layers = packed_layers(rehearsed)
    most = plan_dtypes("auto", rehearsed, PLENTY)
    assert len(most.unpacked) == len(layers) > 8
    least_bytes = plan_dtypes("float32", rehearsed).nbytes(rehearsed)
    counts = []
    for part in (0, 1, 3, 9, 10):
        wanted = least_bytes + (most.nbytes(rehearsed) - least_bytes) * part // 10
        budget_bytes = -(-wanted * 100 // (100 - CACHE_PERCENT))
        plan = plan_dtypes("auto", rehearsed, budget_bytes)
        assert plan.nbytes(rehearsed) * 100 <= budget_bytes * (100 - CACHE_PERCENT)
        assert len(plan.unpacked) + plan.packed == len(layers)
        model = load(opened, "auto", budget_bytes)
        assert sum(each.nbytes for each in parameters(model.module).values()) == plan.nbytes(rehearsed)
        assert set(paths(model.module)) == {each.path for each in layers} - plan.unpacked
        counts.append(len(plan.unpacked))
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, len(layers))


def test_memory_holds_both_forms_of_one_layer_only(tmp_path: Path) -> None:
    wide = config_of("llama", {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6})
    write_store(tmp_path, "m", write_directory(tmp_path / "wide", wide, make_weights(wide, 0, "bfloat16")), "int4")
    opened = open_model("m", tmp_path)
    rehearsed, _ = rehearse(opened)
    plan = plan_dtypes("auto", rehearsed, PLENTY)
    largest = max(each.unpacked_bytes for each in packed_layers(rehearsed))
    before = held_bytes()
    mx.reset_peak_memory()
    model = load(opened, "auto", PLENTY)
    assert not paths(model.module)
    assert mx.get_peak_memory() - before < 1.02 * plan.nbytes(rehearsed) + 1.3 * largest


def test_layers_that_every_token_passes_come_before_the_head_and_experts(published: Published, tmp_path: Path) -> None:
    module = load(put(tmp_path, "qwen3-next", published("qwen3-next"), "int8").open(), "float32").module
    ranks = ["expert" if "switch" in path else "head" if "lm_head" in path else "layer" for path in paths(module)]
    assert ranks == sorted(ranks, key=["layer", "head", "expert"].index)
    assert set(ranks) == {"layer", "head", "expert"}
    assert not any("embed_tokens" in path for path in paths(module)), "a lookup gains nothing"


@pytest.mark.parametrize(("dtype", "device"), [("float32", "cpu"), ("auto", "gpu")])
def test_nothing_is_unpacked_on_gpus_or_against_the_flag(
    dtype: str, device: str, opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype_module, "device", lambda: device)
    rehearsed, _ = rehearse(opened)
    assert paths(load(opened, dtype, PLENTY).module) == paths(rehearsed)


def test_the_log_and_check_tell_what_is_unpacked(
    opened: OpenedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "runner.model.weights.dtype"):
        model = load(opened, "auto", PLENTY)
    line = next(record for record in caplog.records if record.getMessage() == "layers unpacked into float32")
    layers = len(paths(rehearse(opened)[0]))
    assert line.__dict__["attributes"]["unpacked"] == layers
    assert line.__dict__["attributes"]["packed"] == 0
    found = inspect(CheckSettings(model="m", models_dir=tmp_path, dtype="auto", log_level=0))
    assert found.weights is not None
    assert sum(each.tensors for each in found.weights if each.name.startswith("f32, stored as int")) == layers
    assert sum(each.bytes for each in found.weights) == sum(each.nbytes for each in parameters(model.module).values())
