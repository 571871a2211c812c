"""What drafts get to compute, and where it is recorded what mlx-vlm makes of it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from scripts.tools.models.checkpoints import VOCABULARY_SIZE
from scripts.tools.models.dflash import DFLASH2, DRAFT, DSPARK, GLIMMER, LAGUNA

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
    "dflash 2": (DFLASH2, {}),
    "dflash 2, through windows, with longer sums and on scales of its own": (
        DFLASH2,
        {
            "layer_types": ["sliding_attention"] * 2, "sliding_window": 32, "conv_kernel_size": 3, "selector_top_k": 5,
            "input_embedding_scale": 0.5, "output_multiplier": 0.6, "final_logit_softcapping": 2.0,
        },
    ),
    "dspark": (DSPARK, {"rope_is_neox_style": False}),
    "dspark with sinks, behind the last token": (
        DSPARK,
        {
            "causal": True, "attention_sink_bias": True, "sample_from_anchor": False, "dspark_bonus_anchor": True,
            "partial_rotary_factor": 0.25,
        },
    ),
}  # fmt: skip
"""Name -> architecture, and changes of its config."""
CHAINED = [name for name, (architecture, _) in CASES.items() if architecture in (DFLASH2, DSPARK)]
"""Those whose drafts depend on the drafts before them: these are recorded, too."""
ANCHOR = 7
"""The last token of every text."""


def tables() -> tuple[mx.array, mx.array]:
    """The embeddings of all tokens, and the output layer."""
    embeddings, output = (mx.random.normal((VOCABULARY_SIZE, 64), key=mx.random.key(seed)) for seed in (100, 101))
    return embeddings, output / 16


class Step(NamedTuple):
    """A block behind some more features."""

    features: mx.array
    embedded: mx.array


def steps() -> Iterator[Step]:
    for number, (seen, rows) in enumerate(((5, 4), (2, 3), (8, 6), (3, 2))):
        features = mx.random.normal((1, seen, 128), key=mx.random.key(2 * number))
        yield Step(features, mx.random.normal((1, rows, 64), key=mx.random.key(2 * number + 1)))
