"""What is particular to older releases of Ollama, and the writer that stands for them (docs/internals/store.md, 1.6).

`test_sources.py` loads what they wrote.
"""

from pathlib import Path

import mlx.core as mx
import pytest

from runner.errors import ModelError
from runner.model import open_model
from scripts.tools.models.checkpoints import write_directory
from scripts.tools.models.layouts import HEAD, LAYOUTS, plan
from scripts.tools.models.oracle import load_directory, oracle
from scripts.tools.models.sources import Published
from scripts.tools.models.sources_form import read_config
from scripts.tools.models.sources_steps import Weights
from scripts.tools.models.store import Quantization, source_tensors, write_ancient_store
from scripts.tools.models.tensors import to_mlx
from tests.model.loading.conftest import run, same
from tests.model.loading.stored import put


@pytest.mark.parametrize(
    ("name", "release"),
    [("gemma4", "0.23.1"), ("qwen3.5-moe-separate", "0.30"), ("laguna", "0.31.2"), ("laguna", "0.32.8")],
)
def test_a_draft_beside_the_model_is_never_read(name: str, release: str, published: Published, tmp_path: Path) -> None:
    layout = LAYOUTS[release]
    source_dir = published(name, "bfloat16" if name.startswith("qwen3.5") else "float32")
    stored = put(tmp_path, name, source_dir, "int8", layout, draft=True)
    stored.assert_computes_what_the_source_does()
    stored.assert_reads_the_text_model_only()
    assert stored.open().file("tokenizer_config.json") != b"{}"


@pytest.mark.parametrize("quantization", ["int8", "mxfp4"])
def test_a_router_that_an_older_release_packed_is_unpacked(
    quantization: Quantization, published: Published, tmp_path: Path
) -> None:
    """mlx-lm's has no packed class."""
    stored = put(tmp_path, "nemotron-h", published("nemotron-h"), quantization, LAYOUTS["0.20.8"])
    assert "backbone.layers.1.mixer.gate.weight" in stored.plan.packings
    stored.assert_computes_what_the_source_does()


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_what_was_written_before_0_16_is_refused_by_its_age(
    quantization: Quantization | None, published: Published, tmp_path: Path
) -> None:
    write_ancient_store(tmp_path, "old", published("qwen3"), quantization)
    with pytest.raises(ModelError, match=r"stored by Ollama before 0\.16; create or pull the model again"):
        open_model("old", tmp_path)


# The writer itself: were it wrong, the tests above would prove nothing.


def keys(name: str, release: str, quantization: Quantization | None, published: Published) -> set[str]:
    source_dir = published(name, "bfloat16")
    blobs = plan(source_tensors(source_dir), read_config(source_dir), quantization, LAYOUTS[release]).blobs
    return {key for blob in blobs for key in blob.tensors}


def test_the_names_of_each_release(published: Published) -> None:
    """docs/internals/store.md, 1.6, row by row."""
    layer = "model.layers.1.mlp"
    assert f"{layer}.experts.3.up_proj.weight.scale" in keys("glm4-moe-lite", "0.16", "int4", published)
    assert f"{layer}.switch_mlp.up_proj.weight.scale" in keys("glm4-moe-lite", "0.18.3", "int8", published)
    assert f"{layer}.experts.3.up_proj.weight" in keys("glm4-moe-lite", "0.18.3", None, published)
    assert f"{layer}.experts.3.up_proj.weight" in keys("glm4-moe-lite", "0.18.3", "int4", published)  # mixed
    assert f"{layer}.switch_mlp.up_proj.weight" in keys("glm4-moe-lite", "0.20.8", "int4", published)
    assert f"{layer}.experts.up_proj.weight" in keys("glm4-moe-lite", "0.31.2", None, published)

    qwen = keys("qwen3.5-moe", "0.18.2", None, published)
    assert "language_model.model.layers.0.mlp.switch_mlp.gate_proj.weight" in qwen
    assert "vision_tower.layers.0.self_attn.q_proj.weight" in qwen
    assert not any("mtp." in key for key in qwen)
    assert "language_model.mtp.fc.weight" in keys("qwen3.5", "0.30", None, published)
    assert {"mtp.fc.weight", "model.language_model.layers.0.mlp.experts.gate_up_proj"} <= keys(
        "qwen3.5-moe", "0.31.2", None, published
    )

    layer = "model.language_model.layers.1"
    assert f"{layer}.moe.switch_mlp.gate_up_proj.weight" in keys("gemma4-moe", "0.20.8", "int4", published)
    assert f"{layer}.moe.switch_mlp.gate_proj.weight" in keys("gemma4-moe-separate", "0.20.8", "int4", published)
    assert f"{layer}.moe.experts.2.gate_up_proj.weight" in keys("gemma4-moe", "0.20.8", None, published)
    assert f"{layer}.experts.gate_up_proj.scale" in keys("gemma4-moe", "0.31.2", "int4", published)
    assert f"{layer}.moe.gate_proj" in keys("gemma4-moe-separate", "0.31.2", None, published)


def test_the_metadata_of_each_release(published: Published) -> None:
    def metadata(release: str, quantization: Quantization, layer: str) -> dict[str, str]:
        source_dir = published("glm4-moe-lite")
        blobs = plan(source_tensors(source_dir), read_config(source_dir), quantization, LAYOUTS[release]).blobs
        return dict(next(blob.metadata for blob in blobs if blob.layer == layer))

    experts, name = "model.layers.1.mlp.experts", "model.layers.1.mlp.switch_mlp.up_proj.weight"
    linear = "model.layers.0.self_attn.o_proj.weight"
    assert metadata("0.16", "int4", linear) == {"quant_type": "int4", "group_size": "32"}
    assert metadata("0.17.8", "int4", linear) == {"quant_type": "int4", "group_size": "64"}
    assert metadata("0.17.8", "int4", experts) == {}
    early = metadata("0.20.8", "int4", experts)
    assert early[f"{name}.quant_type"] == "int4"
    assert early[f"{name.replace('up', 'down')}.quant_type"] == "int8"
    assert "quant_type" not in early
    assert metadata("0.31.2", "mxfp4", experts) == {"quant_type": "mxfp4", "group_size": "32"}
    assert metadata("0.31.2", "int4", f"{experts}.down_proj.weight") == {"quant_type": "int8", "group_size": "64"}
    assert metadata("0.31.2", "int4", "lm_head.weight")["quant_type"] == "int4"
    assert metadata(HEAD.release, "int4", "lm_head.weight")["quant_type"] == "int8"
    assert metadata(HEAD.release, "nvfp4", "lm_head.weight")["quant_type"] == "mxfp8"


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_rewriting_qwen_changes_nothing_that_counts(name: str, published: Published, tmp_path: Path) -> None:
    """A source stored by 0.18.2 is in mlx-lm's own form, and computes the same as the source."""
    source_dir = published(name, "bfloat16")
    rewritten: Weights = {}
    for blob in plan(source_tensors(source_dir), read_config(source_dir), None, LAYOUTS["0.18.2"]).blobs:
        rewritten |= to_mlx({key: tensor for key, tensor in blob.tensors.items() if not key.startswith("vision_")})
    modules = [
        load_directory(write_directory(tmp_path / "rewritten", read_config(source_dir), rewritten)),
        oracle(tmp_path / "mlx", name, source_dir),
    ]
    for module in modules:
        module.set_dtype(mx.float32)
    assert same(run(modules[0]), run(modules[1]))
