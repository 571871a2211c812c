"""What is particular to older releases of Ollama, and the writer that stands for them (docs/internals/store.md, 1.6).

`test_sources.py` loads what they wrote.
"""

from pathlib import Path

import pytest

from runner.errors import ModelError
from runner.model import open_model
from scripts.tools.models.layouts import LAYOUTS, plan
from scripts.tools.models.sources import Published
from scripts.tools.models.sources_form import read_config
from scripts.tools.models.store import Quantization, source_tensors, write_ancient_store
from tests.model.loading.stored import put


@pytest.mark.parametrize(
    ("name", "release"),
    [("gemma4", "0.23.1"), ("laguna", "0.32.8")],
)
def test_a_draft_beside_the_model_is_never_read(name: str, release: str, published: Published, tmp_path: Path) -> None:
    layout = LAYOUTS[release]
    source_dir = published(name)
    stored = put(tmp_path, name, source_dir, "int8", layout, draft=True)
    stored.assert_computes_what_the_source_does()
    stored.assert_reads_the_text_model_only()
    assert stored.open().file("tokenizer_config.json") != b"{}"


def test_a_router_that_an_older_release_packed_is_unpacked(published: Published, tmp_path: Path) -> None:
    """mlx-lm's has no packed class."""
    stored = put(tmp_path, "nemotron-h", published("nemotron-h"), "mxfp4", LAYOUTS["0.20.8"])
    assert "backbone.layers.1.mixer.gate.weight" in stored.plan.packings
    stored.assert_computes_what_the_source_does()


def test_what_was_written_before_0_16_is_refused_by_its_age(published: Published, tmp_path: Path) -> None:
    write_ancient_store(tmp_path, "old", published("qwen3"), "int4")
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
