"""Single layers may have fields of their own: `per_layer_config`, as transformers has written it since 5.15."""

import copy
import json
from pathlib import Path
from typing import cast

import pytest

from runner.errors import ModelError
from runner.model.architectures import Config, family_of
from runner.model.module_config import module_config
from runner.model.renamed import rename_fields
from scripts.tools.models.sources import Published
from scripts.tools.models.store import write_store
from tests.model.loading.conftest import layers_apart, run_path, same
from tests.model.loading.test_config import rewritten


def gemma(**text: object) -> Config:
    """The text model of a Gemma 4 whose full layers have fields of their own."""
    return {
        "model_type": "gemma4_text",
        "num_hidden_layers": 12,
        "hidden_size": 64,
        "intermediate_size": 128,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "attention_k_eq_v": True,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2,
        "per_layer_config": {layer: {"head_dim": 32, "num_key_value_heads": 1} for layer in ("05", "11")},
        **text,
    }  # fmt: skip


def read(text: Config, *, wrapped: bool, kind: str = "gemma4") -> Config:
    """Returns the text model's part of the config for mlx-lm's module."""
    config: Config = {"model_type": kind, "text_config": text} if wrapped else text
    family = family_of("Gemma4ForConditionalGeneration", config)
    tensors = {f"model.layers.{layer}.x.weight": None for layer in range(12)}
    mended = module_config(copy.deepcopy(config), family, tensors)  # type: ignore[arg-type]
    return cast("Config", mended["text_config"]) if wrapped else mended


@pytest.mark.parametrize("name", ["gemma4-text", "gemma4", "gemma4-moe", "gemma4-unified"])
def test_a_gemma_4_with_fields_for_its_full_layers_answers_as_before(
    name: str, published: Published, tmp_path: Path
) -> None:
    """Unified: full layers have another number of key heads, and the store is packed."""
    source = published(name)
    config = layers_apart(json.loads((source / "config.json").read_text()))
    apart = rewritten(source, tmp_path / "apart", config)
    if name != "gemma4-unified":
        assert same(run_path(apart), run_path(source))
        return
    for each in (source, apart):
        write_store(tmp_path, each.name, each, "mxfp8")
    assert same(run_path("apart", tmp_path), run_path(source.name, tmp_path))


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_the_width_of_its_full_layers_is_any(kind: str, wrapped: bool) -> None:
    read_as = {width: read(gemma(per_layer_config=own), wrapped=wrapped, kind=kind) for width, own in (
        (32, {"05": {"head_dim": 32}, "11": {"head_dim": 32}}),
        (16, {}),
    )}  # fmt: skip
    assert {width: found["global_head_dim"] for width, found in read_as.items()} == {32: 32, 16: 16}
    assert {found["num_global_key_value_heads"] for found in read_as.values()} == {2}
    assert read(gemma(), wrapped=wrapped, kind=kind)["num_global_key_value_heads"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_layer_config": {"05": {"head_dim": 32}}},
            r"per_layer_config: the layers of full_attention must share one head_dim, found \[32, 16\]"),
        ({"per_layer_config": {"03": {"head_dim": 32}}}, "per_layer_config: layer 3 has head_dim 32: gemma4 has one"),
        ({"per_layer_config": {"05": {"intermediate_size": 32}}}, "layer 5 has intermediate_size 32: gemma4 has one"),
        ({"attention_k_eq_v": False}, "per_layer_config: layer 5 has num_key_value_heads 1: gemma4 has one for all l"),
        ({"per_layer_config": {"05": {"skip": ["mlp"]}}}, r"layer 5 has skip \['mlp'\]"),
        ({"per_layer_config": {"12": {}}}, "per_layer_config must map layers to objects, found '12'"),
        ({"per_layer_config": {"-1": {}}}, "per_layer_config must map layers to objects, found '-1'"),
        ({"per_layer_config": {"1" * 5000: {}}}, "per_layer_config must map layers to objects, found '1111"),
        ({"per_layer_config": {"05": 32}}, "per_layer_config must map layers to objects, found '05': 32"),
        ({"per_layer_config": [32]}, r"per_layer_config must be an object, found \[32\]"),
        ({"layer_types": [["full_attention"]] * 12}, "layer 5 has head_dim 32: gemma4 has one for all"),
        ({"layer_types": None}, "layer_types must be a list of kinds of layers, found None"),
    ],
)  # fmt: skip
def test_a_field_that_the_module_cannot_have_is_refused_by_name(changes: Config, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(gemma(**changes), wrapped=True)


def test_fields_of_single_layers_of_any_other_model_are_refused() -> None:
    """transformers writes them for every class: of a pruned model, say. Values that all layers have change nothing."""
    config: Config = {
        "num_hidden_layers": 12,
        "intermediate_size": 64,
        "per_layer_config": {"7": {"intermediate_size": 64}},
    }
    rename_fields(config, "llama")
    config["intermediate_size"] = 32
    with pytest.raises(ModelError, match="layer 7 has intermediate_size 64: llama has one for all layers"):
        rename_fields(config, "llama")
    with pytest.raises(ModelError, match="layer 7 has intermediate_size 64: embedding_gemma2 has one for all"):
        rename_fields(config, "embedding_gemma2")
    rename_fields({**config, "per_layer_config": {"007": {"head_dim": 8}}}, "embedding_gemma2")
