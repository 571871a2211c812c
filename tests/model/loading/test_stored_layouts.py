"""Peculiarities of older releases of Ollama (docs/internals/store.md, 1.6).

`test_sources.py` loads what they wrote.
"""

from pathlib import Path

import pytest

from runner.errors import ModelError
from runner.model import open_model
from scripts.tools.models.layouts import LAYOUTS
from scripts.tools.models.sources import Published
from scripts.tools.models.store import write_ancient_store
from tests.model.loading.stored import put


@pytest.mark.parametrize(("name", "release"), [("gemma4", "0.23.1"), ("laguna", "0.32.8")])
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
