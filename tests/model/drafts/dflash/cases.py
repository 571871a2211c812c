"""What drafts get to compute, and where it is recorded what mlx-vlm makes of it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from scripts.tools.models.dflash import DRAFT, GLIMMER, LAGUNA

RECORDED = Path(__file__).parent / "recorded.safetensors"
CASES: dict[str, tuple[str, Mapping[str, object]]] = {
    "all see all": (DRAFT, {}),
    "some see back": (
        DRAFT, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "causal": True},
    ),
    "neighbours turn together, stretched": (
        DRAFT,
        {
            "rope_interleaved": True,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
            },
        },
    ),
    "laguna": (LAGUNA, {}),
    "glimmer": (GLIMMER, {}),
}  # fmt: skip
"""Name -> architecture, and changes of its config."""


class Step(NamedTuple):
    """A block behind some more features."""

    features: mx.array
    embedded: mx.array


def steps() -> Iterator[Step]:
    for number, (seen, rows) in enumerate(((5, 4), (2, 3), (8, 6), (3, 2))):
        features = mx.random.normal((1, seen, 128), key=mx.random.key(2 * number))
        yield Step(features, mx.random.normal((1, rows, 64), key=mx.random.key(2 * number + 1)))
