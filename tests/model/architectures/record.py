"""Records the logits of mlx-vlm for a Cohere2-MoE, so that the test needs no mlx-vlm.

    python -m tests.model.architectures.record FOLDER

where FOLDER is that of `tests.lib.mlx_vlm`.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from scripts.tools.models.checkpoints import make_weights
from tests.lib.mlx_vlm import module, register

RECORDED = Path(__file__).parent / "recorded.safetensors"
TOKENS = [(11 * index + index * index) % 64 for index in range(20)]
"""More than a window."""
_COMMON = {
    "model_type": "cohere2_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "rope_theta": 10000.0,
    "logit_scale": 0.25,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "tie_word_embeddings": True,
}
CASES: Mapping[str, dict[str, object]] = {
    "softmax": _COMMON
    | {
        "sliding_window_pattern": 2,
        "expert_selection_fn": "softmax",
        "norm_topk_prob": True,
        "num_shared_experts": 0,
        "layer_norm_eps": 1e-5,
        "attention_bias": True,
    },
    "sigmoid, averaged": _COMMON
    | {
        "sliding_window_pattern": 4,
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": True,
        "num_shared_experts": 2,
        "shared_expert_combination_strategy": "average",
        "rms_norm_eps": 1e-5,
    },
    "raw sigmoid, summed, dense first": _COMMON
    | {
        "layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"],
        "first_k_dense_replace": 1,
        "prefix_dense_intermediate_size": 48,
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": False,
        "num_shared_experts": 1,
        "shared_expert_combination_strategy": "sum",
        "rms_norm_eps": 1e-5,
    },
}
"""Configs of which mlx-vlm and transformers make the same."""


def weights_of(name: str) -> dict[str, mx.array]:
    """Returns the weights of a case, under the names of both."""
    return make_weights(CASES[name], 3, "float32")


def logits(name: str) -> mx.array:
    """Returns the logits [L, V] of `TOKENS`."""
    args = module("cohere2_moe.config").ModelConfig.from_dict(CASES[name])
    model: Any = module("cohere2_moe.language").LanguageModel(args)
    model.load_weights([*weights_of(name).items()])
    found: mx.array = model(mx.array([TOKENS])).logits[0]
    return found


if __name__ == "__main__":
    register(Path(sys.argv[1]), ("cohere2_moe",))
    mx.save_safetensors(str(RECORDED), {name: logits(name) for name in CASES})
