"""Records the logits of mlx-vlm for models of ours that it has too, so that the tests need no mlx-vlm.

    python -m tests.model.architectures.record FOLDER

where FOLDER is that of `tests.lib.mlx_vlm`.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

import runner.process.lean_mlx_lm  # noqa: F401
from runner.model import open_model
from runner.model.weights.loading import LoadedModel, load
from scripts.tools.models.checkpoints import make_weights, write_directory
from scripts.tools.models.sources_steps import Weights, per_expert
from scripts.tools.models.store import write_store
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
_KOLIBRI = {
    **{key: _COMMON[key] for key in _COMMON if key not in ("intermediate_size", "logit_scale")},
    "model_type": "kolibri1",
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
    "max_position_embeddings": 512,
    "head_dtype": "float32",
}
KOLIBRI: Mapping[str, dict[str, object]] = {
    "kolibri": _KOLIBRI
    | {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "tie_word_embeddings": False,
    },
    "kolibri, weights of the sum 1, tied": _KOLIBRI
    | {"layer_types": ["sliding_attention"] * 4, "norm_topk_prob": True, "rope_theta": 100.0},
}
"""Likewise."""
_ALL = {**CASES, **KOLIBRI}
_ARCHITECTURES = {"cohere2_moe": "Cohere2MoeForCausalLM", "kolibri1": "Kolibri1ForCausalLM"}


def weights_of(name: str) -> dict[str, mx.array]:
    """Returns the weights of a case, under the names of both."""
    weights = make_weights(_ALL[name], 3, "float32")
    return {name: 5 * each if name.endswith("expert_bias") else each for name, each in weights.items()}


def recorded(name: str) -> mx.array:
    """Returns what was recorded of a case: logits [L, V]."""
    return cast("dict[str, mx.array]", mx.load(str(RECORDED)))[name]


def stored(root: Path, config: Mapping[str, object], weights: Weights) -> LoadedModel:
    """Returns the model as it is loaded from a store."""
    directory = write_directory(
        root / "d", {**config, "architectures": [_ARCHITECTURES[str(config["model_type"])]]}, weights
    )
    write_store(root, "m", directory)
    return load(open_model("m", root))


def check_logits(model: LoadedModel, name: str) -> None:
    """At once and token by token, beyond the window, and without a cache."""
    wanted, layers = recorded(name), model.make_layers()
    found = model.logits(mx.array([TOKENS]), model.make_layers())[0]
    steps = mx.concatenate([model.logits(mx.array([[token]]), layers)[0] for token in TOKENS])
    alone = cast("mx.array", model.module(mx.array([TOKENS])))[0]
    assert mx.abs(wanted).max() > 0.5
    for each in (found, steps, alone):
        assert mx.abs(each - wanted).max() < 2e-5 * mx.abs(wanted).max()


def apart(weights: Weights) -> Weights:
    """Returns the weights with each expert by itself, as they are published."""
    return per_expert("mlp.switch_mlp", "mlp.experts")(weights)


def logits(name: str) -> mx.array:
    """Returns the logits [L, V] of `TOKENS`."""
    package = _ALL[name]["model_type"]
    args = module(f"{package}.config").ModelConfig.from_dict(_ALL[name])
    model: Any = module(f"{package}.language").LanguageModel(args)
    model.load_weights([*model.sanitize(weights_of(name)).items()])
    found: mx.array = model(mx.array([TOKENS])).logits[0]
    return found


if __name__ == "__main__":
    register(Path(sys.argv[1]), ("cohere2_moe", "kolibri1"))
    mx.save_safetensors(str(RECORDED), {name: logits(name) for name in _ALL})
