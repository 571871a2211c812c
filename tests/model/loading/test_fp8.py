"""Models published in FP8 with scales: every module computes with the numbers that these mean."""

from pathlib import Path

import mlx.core as mx
import pytest

from runner.model import open_model
from runner.model.weights.loading import load
from scripts.tools.models.architectures import config
from scripts.tools.models.checkpoints import make_weights, write_directory
from scripts.tools.models.sources import Published
from scripts.tools.models.sources_form import Config, read_config
from scripts.tools.models.sources_steps import Weights
from scripts.tools.models.tensors import safetensors_bytes
from tests.lib.packed_sources import in_fp8
from tests.model.loading.conftest import parameters

BLOCK = 48
"""Does not divide the sizes: the last blocks are smaller."""


def loaded(directory: Path) -> Weights:
    return parameters(load(open_model(str(directory), directory)).module)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("qwen3", "blocks"),
        ("qwen3-moe", "blocks"),
        ("deepseek-v3", "blocks"),
        ("kolibri1", "blocks"),
        ("ministral3", "tensor"),
    ],
)
def test_numbers_in_8_bits_are_what_they_mean(name: str, form: str, published: Published, tmp_path: Path) -> None:
    """Modules that do not know FP8, modules that know blocks, and one that takes the bytes for numbers."""
    if name == "ministral3":
        said: Config = {**config(name), "architectures": ["Ministral3ForCausalLM"]}
        weights = make_weights(said, 0, "float32")
    else:
        said, stored = read_config(published(name)), mx.load(str(published(name) / "model.safetensors"))
        assert isinstance(stored, dict)
        weights = stored
    said["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    packed, numbers = in_fp8(weights, BLOCK if form == "blocks" else None)
    (write_directory(tmp_path / "fp8", said, {}) / "model.safetensors").write_bytes(safetensors_bytes(packed))
    found = loaded(tmp_path / "fp8")
    wanted = loaded(write_directory(tmp_path / "numbers", said, numbers))
    assert found.keys() == wanted.keys()
    for key, array in found.items():
        assert array.dtype == wanted[key].dtype, key
        assert mx.array_equal(array, wanted[key]), key
