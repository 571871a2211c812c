"""No graph of a package of mlx-vlm grows with its prompt."""

import pytest

from runner.vlm import packages
from tests.model.architectures.test_nodes import growing

BY_PIECES = ["vlm/glm5_next"]
"""Its sparse attention gathers keys for 16 tokens at a time, to save memory."""


@pytest.mark.parametrize("platform", ["cpu", "cuda", "metal"])
def test_no_graph_grows_with_its_prompt(platform: str) -> None:
    assert growing(platform, *(f"vlm/{name}" for name in sorted(packages.COMPARED))) == BY_PIECES
