"""No graph of a package of mlx-vlm grows with its prompt."""

import pytest

from runner.vlm import packages
from tests.model.architectures.test_nodes import growing

BY_PIECES = ["vlm/glm5_next", "vlm/z1t"]
"""The sparse attention of glm5_next gathers keys for 16 tokens at a time, to save memory. z1t has one node more from 17
tokens on."""


@pytest.mark.parametrize("platform", ["cpu", "cuda", "metal"])
def test_no_graph_grows_with_its_prompt(platform: str) -> None:
    assert growing(platform, *(f"vlm/{name}" for name in sorted(packages.COMPARED))) == BY_PIECES
