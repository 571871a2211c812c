"""A null in `config.json` equals a missing field: every field of every architecture is compared."""

import importlib
import json
from pathlib import Path

import mlx.core as mx
import pytest

from runner.model import open_model
from runner.model.weights.load import load
from scripts.tools.models.architectures import config
from scripts.tools.models.checkpoints import TOKENIZER, config_of, make_weights, write_checkpoint, write_weights
from tests.model.loading.conftest import run_path, same


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("deepseek_v2", "q_lora_rank"),
        ("deepseek_v3", "q_lora_rank"),
        ("kimi_vl", "q_lora_rank"),
        ("glm4_moe", "n_shared_experts"),
        ("glm4_moe_lite", "q_lora_rank"),
        ("gemma4_text", "final_logit_softcapping"),
        ("mixtral", "num_key_value_heads"),
        ("phi", "num_key_value_heads"),
        ("mimo_v2_flash", "n_shared_experts"),
        ("mimo_v2_flash", "routed_scaling_factor"),
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


@pytest.mark.parametrize("field", ["rope_theta", "num_key_value_heads", "max_position_embeddings", "rope_scaling"])
def test_a_llama_with_a_null_computes_what_it_computes_without(field: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "d", "llama", overrides={field: None, "num_attention_heads": 2})
    without = run_path(directory)
    value = config_of("llama", {field: None, "num_attention_heads": 2})
    (directory / "config.json").write_text(json.dumps({**value, field: None}))
    assert same(run_path(directory), without)


def test_nulls_within_nested_objects_are_none_either(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "d", "llama")
    without = run_path(directory)
    value = config_of("llama")
    scaling = value["rope_scaling"]
    assert isinstance(scaling, dict)
    value |= {"rope_scaling": {**scaling, "rope_theta": None}, "rope_parameters": {"rope_theta": None}}
    (directory / "config.json").write_text(json.dumps({**value, "text_config": None, "quantization": None}))
    assert same(run_path(directory), without)
