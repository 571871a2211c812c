"""The published models are what they are meant to be: mlx-lm opens them, and finds in them what was drawn."""

from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from scripts.tools.models.checkpoints import make_weights
from scripts.tools.models.oracle import oracle
from scripts.tools.models.sources import SOURCES, published, write_source
from scripts.tools.models.tensors import PACKINGS

QUANTIZED = {"gpt-oss"}
"""Published in a packed form, which the drawn numbers do not survive."""
MULTIPLIED = {"falcon-h1"}
"""mlx-lm folds factors of the config into the weights."""


@pytest.mark.parametrize("name", sorted(SOURCES.keys() - QUANTIZED - MULTIPLIED))
def test_mlx_lm_finds_in_a_source_what_was_drawn(name: str, tmp_path: Path) -> None:
    """Names, shapes and places. A norm that lost one and got it again may have lost its last bit."""
    module = oracle(tmp_path / "mlx", name, write_source(tmp_path / "source", name))
    drawn = make_weights(SOURCES[name].module, 0, "float32")
    found = dict(tree_flatten(module.parameters()))
    assert found.keys() <= drawn.keys()
    assert all(name.endswith("lm_head.weight") for name in drawn.keys() - found.keys())
    assert all(mx.allclose(array, drawn[key], rtol=0, atol=1e-6) for key, array in found.items())


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_is_wide_enough_to_be_packed(name: str) -> None:
    """Matrices of the text model whose rows fit no group would never be packed, and their tests test nothing."""
    narrow = ("per_layer_projection", "conv", "_scales")
    for key, array in published(SOURCES[name], "float32").items():
        if array.ndim in (2, 3) and array.size >= 1024 and not any(part in key for part in narrow):
            assert array.shape[-1] % PACKINGS["int4"].group_size == 0, key
