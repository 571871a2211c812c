"""A null in `config.json` equals a missing field: every field of every architecture is compared."""

import dataclasses
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from runner.errors import ModelError
from runner.model import OpenedModel, open_model
from runner.model.families import Config
from runner.model.weights.assemble import build_module
from runner.model.weights.load import load
from scripts.tools.models.architectures import architectures, config, make_module, unserved
from scripts.tools.models.checkpoints import TOKENIZER, config_of, make_weights, write_checkpoint, write_weights
from scripts.tools.models.sources import SOURCES, write_source
from tests.model.loading.conftest import run_path, same

NAMES = ("text_config", "model_type", "architectures")


def fields(value: Config) -> Iterator[tuple[Config, str]]:
    """Yields every field of the text model, with the object that contains it."""
    text = value.get("text_config", value.get("llm_config"))
    for part in (value, text) if isinstance(text, dict) else (value,):
        yield from ((cast("Config", part), key) for key in list(part) if key not in (*NAMES, "llm_config"))


def outcome(directory: Path, value: Config) -> tuple[OpenedModel | None, str]:
    """Returns the model opened with that config, or the error."""
    (directory / "config.json").write_text(json.dumps(value))
    try:
        return open_model(str(directory), directory), ""
    except ModelError as error:
        return None, str(error)


def demanded(name: str) -> set[str]:
    """The fields of an architecture's own classes that have no default."""
    classes = [
        item for item in vars(importlib.import_module(f"mlx_lm.models.{name}")).values() if isinstance(item, type)
    ]
    return {
        field.name
        for cls in classes
        if dataclasses.is_dataclass(cls)
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }


def refusal(opened: OpenedModel) -> str:
    """Returns the fields that mlx-lm's classes miss; nothing if they accept the config."""
    try:
        build_module(opened)
    except ModelError as error:
        return str(error)
    return ""


def check(directory: Path, value: Config) -> None:
    """Each null is read as a missing field, or is a value to the module; a missing field is named."""
    for part, key in fields(value):
        kept = part.pop(key)
        without, said = outcome(directory, value)
        part[key] = None
        with_null, also_said = outcome(directory, value)
        part[key] = kept
        assert said == also_said, key
        if without is None or with_null is None:
            assert key in said or key == "rope_parameters", said  # of that, a field is named
        elif with_null.module_config != without.module_config:
            module, _ = build_module(with_null)
            mx.eval(module(mx.array([[1, 2, 3]])))
        elif key in demanded(without.family.module):
            why = refusal(without)
            assert not why or re.search(rf"\b{key}\b", why), why


@pytest.mark.parametrize("name", [name for name in architectures() if name not in unserved()])
def test_a_null_is_no_field_to_any_architecture(name: str, tmp_path: Path) -> None:
    write_weights(tmp_path, dict(tree_flatten(make_module(name).parameters())))
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    check(tmp_path, {**config(name), "model_type": name, "architectures": [f"{name}X"]})


@pytest.mark.parametrize("name", SOURCES)
def test_a_null_is_no_field_to_what_is_published(name: str, tmp_path: Path) -> None:
    directory = write_source(tmp_path / "d", name)
    check(directory, json.loads((directory / "config.json").read_text()))


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
