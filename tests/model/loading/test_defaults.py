"""Fields with a default in Ollama or mlx-lm may be missing; `check` tells the defaults."""

import json
from pathlib import Path

import pytest

from runner.commands.check.facts import Inspection, inspect
from runner.commands.check.text import as_text
from runner.settings import CheckSettings
from scripts.tools.models.checkpoints import write_checkpoint
from scripts.tools.models.sources import write_source
from scripts.tools.models.store import write_store
from tests.model.loading.conftest import run_path, same


def check(model: str, models_dir: Path) -> Inspection:
    return inspect(CheckSettings(model=model, models_dir=models_dir, log_level=0))


@pytest.mark.parametrize(
    ("name", "filled"),
    [
        ("llama", {"rms_norm_eps": 1e-5}),
        ("llama", {"rope_theta": 10000.0}),
        ("qwen3", {"rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0}),
        ("laguna", {"rms_norm_eps": 1e-6}),
        ("laguna", {"moe_routed_scaling_factor": 1.0, "sliding_window": 512}),
        ("muse-glimmer", {"rms_norm_eps": 1e-5, "qk_scale_factor": 3.87}),
        ("glm4-moe-lite", {"rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8}),
        ("glm4-moe-lite", {"num_experts_per_tok": 4}),
        ("nemotron-h", {"layer_norm_epsilon": 1e-5, "conv_kernel": 4}),
        ("qwen3.5", {"rms_norm_eps": 1e-6}),
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
    assert not filled.keys() & check(str(directory), tmp_path).defaults.keys()
    for key in filled:
        del text[key]
    (directory / "config.json").write_text(json.dumps(config))
    write_store(tmp_path, "m", directory)
    for model in (str(directory), "m"):
        found = check(model, tmp_path)
        assert (found.loads, found.problems) == (True, [])
        assert {key: found.defaults.get(key) for key in filled} == filled
        assert same(run_path(model, tmp_path), said)


def test_the_table_names_field_and_value(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "d", "llama", overrides={"rope_theta": None})
    lines = as_text(check(str(directory), tmp_path)).splitlines()
    assert "defaults      rope_theta 10000: missing from config.json" in lines


def test_how_many_layers_there_are_is_demanded_though_a_class_has_a_default(tmp_path: Path) -> None:
    """A part of a model would be taken for the whole."""
    directory = write_source(tmp_path / "d", "laguna")
    config = json.loads((directory / "config.json").read_text())
    del config["num_hidden_layers"]
    (directory / "config.json").write_text(json.dumps(config))
    assert check(str(directory), tmp_path).problems == ["config.json lacks num_hidden_layers (in its top level)"]
