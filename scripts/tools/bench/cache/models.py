"""Models of a few million parameters for benchmarks, one for every kind of layer cache, made from a seed.

The weights are random, and scaled so that what a layer remembers decides the next token.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_map_with_path, tree_reduce

import runner.process.lean_mlx_lm  # noqa: F401  registers mlx_lm without its package __init__

# isort: split
from mlx_lm.models import deepseek_v3, gemma3_text, llama, llama4, mamba2, qwen3_next
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

HEAD = 64
WINDOW = 512
CHUNK = 1024
KV_BITS = 8


class Size(NamedTuple):
    """The size of a model: the width, a multiple of 2 x HEAD; the number of layers, rounded up to whole periods where
    kinds of layers alternate; and the number of tokens."""

    hidden: int
    layers: int
    vocabulary: int


class Forward(Protocol):
    """Token ids [1, L] and a cache list to logits [1, L, V]."""

    layers: Sequence[object]

    def __call__(self, inputs: mx.array, cache: list[object]) -> mx.array: ...


class Subject(NamedTuple):
    """A model to measure: `make_layers` makes its fresh cache list."""

    kind: str
    model: Forward
    parameters: int
    make_layers: Callable[[], list[object]]


_KINDS: dict[str, tuple[ModuleType, str, int, dict[str, object]]] = {
    "plain": (llama, "keys and values of every token", 1, {}),
    "window": (
        gemma3_text,
        f"every other layer keeps a sliding window of {WINDOW} tokens",
        2,
        {"query_pre_attn_scalar": HEAD, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    ),
    "recurrent": (
        mamba2,
        "a recurrent state in every layer, nothing else",
        1,
        {
            "state_size": HEAD,
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4,
            "n_groups": 1,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_limit": (0.001, 10.0),
            "time_step_rank": "auto",
        },
    ),
    "hybrid": (
        qwen3_next,
        "every other layer is recurrent",
        2,
        {
            "linear_key_head_dim": HEAD,
            "linear_value_head_dim": HEAD,
            "linear_conv_kernel_dim": 4,
            "num_experts": 0,
            "num_experts_per_tok": 1,
            "decoder_sparse_step": 1,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "full_attention_interval": 2,
        },
    ),
    "mla": (
        deepseek_v3,
        "latent attention: one narrow head",
        1,
        {
            "n_routed_experts": None,
            "kv_lora_rank": HEAD,
            "q_lora_rank": 2 * HEAD,
            "qk_rope_head_dim": HEAD // 2,
            "qk_nope_head_dim": HEAD,
            "v_head_dim": HEAD,
        },
    ),
    "chunk": (
        llama4,
        f"three of four layers attend within chunks of {CHUNK} tokens",
        4,
        {
            "attention_bias": False,
            "attention_chunk_size": CHUNK,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "use_qk_norm": True,
        },
    ),
    "quantized": (llama, f"keys and values in {KV_BITS} bits", 1, {}),
}
"""mlx-lm's module, the meaning, the layers until their kinds repeat, and options beside those of all."""

KINDS = {kind: meaning for kind, (_, meaning, _, _) in _KINDS.items()}


def _make(kind: str, size: Size) -> Module:
    module, _, period, special = _KINDS[kind]
    hidden, heads = size.hidden, size.hidden // HEAD
    layers = -(-size.layers // period) * period
    options = {
        "model_type": module.__name__.rpartition(".")[2],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": HEAD,
        "rms_norm_eps": 1e-5,
        "vocab_size": size.vocabulary,
        "max_position_embeddings": 1 << 20,
        "tie_word_embeddings": True,
    }
    own: dict[str, dict[str, object]] = {
        "recurrent": {"num_heads": 2 * heads, "intermediate_size": 2 * hidden},
        "hybrid": {
            "linear_num_value_heads": heads,
            "linear_num_key_heads": heads // 2,
            "shared_expert_intermediate_size": hidden,
            "mlp_only_layers": list(range(layers)),
            "moe_intermediate_size": hidden,
        },
        "mla": {"moe_intermediate_size": hidden, "num_key_value_heads": heads},
        "chunk": {
            "interleave_moe_layer_step": 2 * layers,  # no experts
            "intermediate_size": hidden,
            "intermediate_size_mlp": 3 * hidden,
        },
    }
    options = {**options, **special, **own.get(kind, {})}
    if module is llama4:
        options = {"text_config": options, "model_type": "llama4"}
    model: Module = module.Model(module.ModelArgs.from_dict(options))
    return model


def make_subject(kind: str, size: Size, seed: int = 0) -> Subject:
    """The model of a kind out of KINDS, the same weights for the same seed."""
    if size.hidden % (2 * HEAD) or size.layers < 1:
        raise ValueError(f"the width of a model is a multiple of {2 * HEAD}, and it has layers")
    mx.random.seed(seed)
    model = _make(kind, size)
    model.update(tree_map_with_path(_weight, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    parameters: int = tree_reduce(lambda total, weight: total + weight.size, model.parameters(), 0)

    def make_layers() -> list[object]:
        if kind == "quantized":
            return [QuantizedKVCache(group_size=HEAD, bits=KV_BITS) for _ in model.layers]
        return list(make_prompt_cache(model))

    return Subject(kind, model, parameters, make_layers)


def _weight(path: str, fresh: mx.array) -> mx.array:
    if path.endswith("A_log"):
        return mx.full(fresh.shape, -4.0, mx.float32)  # a long memory
    if "norm" in path or fresh.ndim < 2:
        return fresh
    if "embed" in path:
        return mx.random.normal(fresh.shape, scale=fresh.shape[-1] ** -0.5)
    return mx.random.normal(fresh.shape, scale=2.0 / fresh.shape[-1] ** 0.5)
