"""Fields with a default in Ollama or mlx-lm may be missing; `check` tells the defaults."""

import importlib
import json
from pathlib import Path

import mlx.core as mx
import pytest

from runner.model import open_model
from runner.model.weights.loading import load
from scripts.tools.models.architectures import config
from scripts.tools.models.checkpoints import TOKENIZER, config_of, make_weights, write_checkpoint, write_weights
from scripts.tools.models.sources import write_source
from scripts.tools.models.store import write_store
from tests.model.loading.conftest import checked, run_path, same


@pytest.mark.parametrize(
    ("name", "filled"),
    [
        ("llama", {"rope_theta": 10000.0}),
        ("laguna", {"moe_routed_scaling_factor": 1.0, "sliding_window": 512}),
        ("muse-glimmer", {"rms_norm_eps": 1e-5, "qk_scale_factor": 3.87}),
        ("nemotron-h", {"layer_norm_epsilon": 1e-5, "conv_kernel": 4}),
    ],
)
def test_a_field_that_has_a_default_is_not_demanded(name: str, filled: dict[str, object], tmp_path: Path) -> None:
    """A config without the fields computes the same as one with the defaults, from a store and from a directory."""
    directory = write_source(tmp_path / "d", name)
    config = json.loads((directory / "config.json").read_text())
    text = config.get("text_config", config)
    text.update(filled)
    (directory / "config.json").write_text(json.dumps(config))
    said = run_path(directory)
    assert not filled.keys() & checked(directory, tmp_path).defaults.keys()
    for key in filled:
        del text[key]
    (directory / "config.json").write_text(json.dumps(config))
    write_store(tmp_path, "m", directory)
    for model in (str(directory), "m"):
        found = checked(model, tmp_path)
        assert (found.loads, found.problems) == (True, [])
        assert {key: found.defaults.get(key) for key in filled} == filled
        assert same(run_path(model, tmp_path), said)


def test_how_many_layers_there_are_is_demanded_though_a_class_has_a_default(tmp_path: Path) -> None:
    """A part of a model would be taken for the whole."""
    directory = write_source(tmp_path / "d", "laguna")
    config = json.loads((directory / "config.json").read_text())
    del config["num_hidden_layers"]
    (directory / "config.json").write_text(json.dumps(config))
    assert checked(directory, tmp_path).problems == ["config.json lacks num_hidden_layers (in its top level)"]


# A null in `config.json` equals a missing field; `architectures/` compares every field of every architecture.


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("deepseek_v3", "q_lora_rank"),
        ("glm4_moe", "n_shared_experts"),
        ("gemma4_text", "final_logit_softcapping"),
        ("mixtral", "num_key_value_heads"),
        ("exaone4", "sliding_window_pattern"),
        ("olmo_hybrid", "rope_theta"),
    ],
)
def test_a_null_that_says_something_is_kept(name: str, field: str, tmp_path: Path) -> None:
    """Published configs have such nulls: DeepSeek-V2-Lite has uncompressed queries, a small EXAONE 4 no window."""
    value = config(name)
    text = value.get("text_config")
    (text if isinstance(text, dict) else value)[field] = None
    value["model_type"] = name
    weights = make_weights(value, 0, "float32")
    write_weights(tmp_path, weights)
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (tmp_path / "config.json").write_text(json.dumps({**value, "architectures": [f"{name}X"]}))
    classes = importlib.import_module(f"mlx_lm.models.{name}")
    module = classes.Model(classes.ModelArgs.from_dict(json.loads(json.dumps(value))))
    module.load_weights(list(weights.items()))
    tokens = mx.array([list(range(20))])
    found = load(open_model(str(tmp_path), tmp_path)).module
    assert mx.array_equal(found(tokens), module(tokens))


def test_nulls_within_nested_objects_are_none_either(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "d", "llama")
    without = run_path(directory)
    value = config_of("llama")
    scaling = value["rope_scaling"]
    assert isinstance(scaling, dict)
    value |= {"rope_scaling": {**scaling, "rope_theta": None}, "rope_parameters": {"rope_theta": None}}
    (directory / "config.json").write_text(json.dumps({**value, "text_config": None, "quantization": None}))
    assert same(run_path(directory), without)
