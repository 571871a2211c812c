"""Configs that mlx-lm would read differently, mostly with silently wrong logits as a result.

See docs/internals/store.md, 3.
"""

import json
from pathlib import Path
from typing import cast

import pytest

from runner.errors import ModelError
from runner.model import OpenedModel, open_model
from runner.model.architectures import Config
from runner.model.weights.loading import load
from scripts.tools.models.checkpoints import CHUNK, VOCABULARY_SIZE, Kind, config_of, write_checkpoint
from scripts.tools.models.store import Store
from scripts.tools.models.tensors import Tensor, safetensors_bytes
from tests.model.loading.conftest import Checkpoints, run_path, same


def rewritten(source: Path, directory: Path, config: Config, tensors: dict[str, Tensor] | None = None) -> Path:
    """Copies `source` with another `config.json`, and other weights if given."""
    directory.mkdir()
    for path in source.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    (directory / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return directory


def opened_with(tmp_path: Path, kind: Kind, **overrides: object) -> OpenedModel:
    """Opens the checkpoint of `kind` with changed top-level config entries; None deletes one."""
    source = write_checkpoint(tmp_path / "source", kind)
    return open_model(str(rewritten(source, tmp_path / "changed", config_of(kind, overrides))), tmp_path)


def text_of(opened: OpenedModel) -> Config:
    key = opened.family.text
    return cast("Config", opened.module_config[key]) if key else opened.module_config


@pytest.mark.parametrize("said", [None, False])
def test_an_output_projection_is_used_unless_the_file_says_tied(said: bool | None, tmp_path: Path) -> None:
    """mlx-lm's llama treats a missing flag as tied and drops the projection."""
    source = write_checkpoint(tmp_path / "source", "llama", overrides={"tie_word_embeddings": False})
    config = config_of("llama", {"tie_word_embeddings": said})
    directory = rewritten(source, tmp_path / "changed", config)
    assert same(run_path(directory), run_path(source))
    tied = rewritten(source, tmp_path / "tied", config_of("llama", {"tie_word_embeddings": True}))
    assert not same(run_path(tied), run_path(source))
    assert "lm_head.weight" not in open_model(str(tied), tmp_path).tensors


def test_gemma_without_a_vocabulary_size_takes_that_of_its_embedding(tmp_path: Path) -> None:
    """mlx-lm's default is 262208, and it overrides what the text config says."""
    config = config_of("gemma3", {"vocab_size": None})
    source = write_checkpoint(tmp_path / "source", "gemma3")
    directory = rewritten(source, tmp_path / "changed", config)
    assert same(run_path(directory), run_path(source))
    del cast("Config", config["text_config"])["vocab_size"]
    assert open_model(str(rewritten(source, tmp_path / "none", config)), tmp_path).vocab_size == VOCABULARY_SIZE


@pytest.mark.parametrize(
    ("place", "key"), [("", "quantization"), ("text_config", "quantization_config"), ("", "compression_config")]
)
def test_what_describes_the_source_of_a_conversion_is_removed(place: str, key: str, tmp_path: Path) -> None:
    kind: Kind = "gemma3" if place else "llama"
    config = config_of(kind)
    (cast("Config", config[place]) if place else config)[key] = {"quant_method": "fp8", "bits": 3, "group_size": 7}
    source = write_checkpoint(tmp_path / "source", kind)
    directory = rewritten(source, tmp_path / "changed", config)
    opened = open_model(str(directory), tmp_path)
    assert key not in opened.module_config
    assert key not in text_of(opened)
    assert same(run_path(directory), run_path(source))


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"hidden_size": 0}, "invalid hidden_size: 0"),
        ({"hidden_size": "64"}, "invalid hidden_size: '64'"),
        ({"num_attention_heads": True}, "invalid num_attention_heads: True"),
        (
            {"head_dim": None, "num_attention_heads": 5},
            r"hidden_size \(64\) must be divisible by num_attention_heads \(5\)",
        ),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be divisible by num_key_value_heads \(3\)"),
    ],
)
def test_a_field_that_makes_no_model_is_refused(overrides: dict[str, object], text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"^config\.json: {text}$"):
        opened_with(tmp_path, "llama", **overrides)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"num_heads": None}, "it lacks num_heads"),
        ({"num_heads": "eight"}, r"TypeError: .* \(num_heads is 'eight'\)"),
        ({"num_heads": {"a": [1]}, "state_size": 4.5}, r"TypeError: .* \(num_heads is \{'a': \[1\]\}\)"),
        ({"state_size": 10**40}, rf"\w+: .* \(state_size is {10**40}\)"),
    ],
)
def test_a_field_that_only_mlx_lm_knows_is_named_at_loading(
    overrides: dict[str, object], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=rf"^config\.json does not fit mlx_lm\.models\.mamba2: {why}$"):
        load(opened_with(tmp_path, "mamba2", **overrides))


def test_qwen3s_head_width_has_transformers_default(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "qwen3", overrides={"head_dim": 128})
    directory = rewritten(source, tmp_path / "changed", config_of("qwen3", {"head_dim": None}))
    assert same(run_path(directory), run_path(source))


def test_conditional_gemma_has_a_context_length_by_default(tmp_path: Path) -> None:
    text = dict(cast("Config", config_of("gemma3")["text_config"]))
    del text["max_position_embeddings"]
    assert opened_with(tmp_path, "gemma3", text_config=text).context_length == 131072


@pytest.mark.parametrize("architectures", [None, "LlamaForCausalLM"])
def test_a_directory_without_architectures_goes_by_its_model_type(architectures: object, tmp_path: Path) -> None:
    opened = opened_with(tmp_path, "llama", architectures=architectures)
    assert opened.architecture == "LlamaForCausalLM"


def test_an_unmapped_architecture_runs_on_the_module_of_its_model_type(checkpoint: Checkpoints, tmp_path: Path) -> None:
    opened = open_model(str(checkpoint("llama4")), tmp_path)
    assert (opened.architecture, opened.family.module) == ("Llama4ForConditionalGeneration", "llama4")
    assert [getattr(layer, "chunk_size", None) for layer in load(opened).make_layers()] == [CHUNK, CHUNK, CHUNK, None]
    renamed = opened_with(tmp_path, "llama", architectures=["XverseForCausalLM"], model_type="xverse")
    assert renamed.family.module == "llama"
    load(renamed)


@pytest.mark.parametrize("model_type", ["base", "rope_utils"])
def test_a_module_of_mlx_lm_that_is_no_model_is_no_architecture(model_type: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^unsupported architecture: Foo"):
        load(opened_with(tmp_path, "llama", architectures=["Foo"], model_type=model_type))


def test_another_encoder_is_left_to_ollamas_runner(tmp_path: Path) -> None:
    """In the words that let the launcher hand it over."""
    with pytest.raises(ModelError, match=r"^unsupported architecture: BertModel$"):
        opened_with(tmp_path, "llama", architectures=["BertModel"], model_type="embedding")


def test_the_same_tensor_under_two_names_is_refused(store: Store) -> None:
    tensors = store.tensors("model.norm.weight")
    store.put_tensors("again", {"language_model.model.norm.weight": tensors["model.norm.weight"]})
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight is in the model twice: .*sha256-.*sha256-"):
        open_model("tiny", store.models_dir)


def test_what_only_full_layers_have_is_not_lifted_for_all(tmp_path: Path) -> None:
    fields: Config = {"rope_theta": 5.0, "partial_rotary_factor": 0.5}
    nested: Config = {"full_attention": fields, "sliding_attention": {}}
    found = []
    for name, rope in (("nested", nested), ("flat", fields)):
        (tmp_path / name).mkdir()
        opened = opened_with(tmp_path / name, "llama", rope_theta=None, rope_scaling=None, rope_parameters=rope)
        found.append((opened.module_config["rope_theta"], opened.module_config.get("partial_rotary_factor")))
    assert found == [(5.0, None), (5.0, 0.5)]
