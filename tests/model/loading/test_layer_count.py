"""Layers beyond the count in the config are refused by name, except multi-token predictors."""

import json
from pathlib import Path

import pytest

from runner.errors import ModelError
from runner.model import open_model
from runner.model.architectures import Config
from runner.model.layer_counts import check_extra_layers, extra_layers
from scripts.tools.models.checkpoints import write_checkpoint
from scripts.tools.models.store import write_store
from scripts.tools.models.tensors import read_tensors, safetensors_bytes
from tests.model.loading.conftest import checked
from tests.model.loading.malformed import zeros

PREDICTORS = {
    "DeepSeek and GLM": ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.o_proj"),
    "Ling": ("eh_proj", "enorm", "hnorm", "final_layernorm", "attention.dense", "mlp.experts.0.up_proj"),
    "Step": ("enorm", "hnorm", "eh_proj", "transformer.shared_head.output", "mlp.up_proj"),
    "only what joins": ("eh_proj", "mlp.up_proj"),
}


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next"])
def test_a_config_that_counts_less_than_there_is_names_what_it_leaves_out(kind: str, tmp_path: Path) -> None:
    """Dense, with experts, and hybrid: DeepSeek's second layer differs from its first, but is a layer too."""
    directory = write_checkpoint(tmp_path / "d", kind)  # type: ignore[arg-type]  # they are kinds
    text = json.loads((directory / "config.json").read_text())
    total = text["num_hidden_layers"]
    (directory / "config.json").write_text(json.dumps({**text, "num_hidden_layers": 1}))
    left_out = ", ".join(f"model.layers.{number}" for number in range(1, total))
    said = (
        f"config.json: num_hidden_layers is 1, but the model holds {left_out} too:"
        " config and tensors belong to different models"
    )
    write_store(tmp_path, "m", directory)
    for model in (str(directory), "m"):
        with pytest.raises(ModelError) as refused:
            open_model(model, tmp_path)
        assert str(refused.value) == said
        assert checked(model, tmp_path).problems[0] == said


@pytest.mark.parametrize("names", PREDICTORS.values(), ids=PREDICTORS)
def test_what_predicts_further_tokens_is_passed_over(names: tuple[str, ...], tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "d", "llama")
    tensors = read_tensors(directory / "model.safetensors")
    count = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    more = {f"model.layers.{count}.{name}.weight": zeros("F32", 64, 64) for name in names}
    (directory / "model.safetensors").write_bytes(safetensors_bytes({**tensors, **more}))
    write_store(tmp_path, "m", directory)
    for model in (str(directory), "m"):
        found = checked(model, tmp_path)
        assert (found.loads, found.problems) == (True, [])
        assert found.skipped is not None
        assert {amount.name: amount.tensors for amount in found.skipped}["layers beyond the last"] == len(names)


def test_one_predictor_does_not_excuse_another_layer() -> None:
    text: Config = {"num_hidden_layers": 2}
    names = ("model.layers.2.eh_proj.weight", "model.layers.2.mlp.x.weight", "model.layers.7.mlp.x.weight")
    many = [f"model.layers.{number}.mlp.x.weight" for number in range(1, 41)]
    for given, held in ((names, r"model\.layers\.7 too"), (many, r"model\.layers\.2, .* and 33 more too")):
        with pytest.raises(ModelError, match=rf"num_hidden_layers is 2, but the model holds {held}"):
            check_extra_layers(extra_layers(given, text), text)


@pytest.mark.parametrize("prefix", ["model.language_model.", "backbone.", ""])
def test_only_the_layers_of_the_text_model_are_compared(prefix: str) -> None:
    """Layers of towers do not count, nor do rotary tables, which no model needs."""
    text: Config = {"num_hidden_layers": 4}
    beyond = f"{prefix}layers.4.mlp.up_proj.weight"
    within = (
        f"{prefix}layers.3.mlp.up_proj.weight",
        f"{prefix}layers.4.self_attn.rotary_emb.inv_freq",
        f"encoder.{prefix}layers.4.x.weight",
        f"vision_tower.{prefix}layers.4.x.weight",
        "mtp.layers.4.x.weight",
    )
    assert extra_layers([beyond, *within], text) == {beyond: f"{prefix}layers.4"}
    assert extra_layers([beyond], {}) == {}
