"""Writes tiny random-weight models as Hugging Face style directories: one per family we map, one per cache kind.

Weights are made by mlx-lm's own module from a seed, so a directory always loads, and equal arguments give equal bytes
of every tensor. Norms and biases are noisy, so that a tensor in the wrong place changes the logits.
"""

import copy
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

import mlx.core as mx
from mlx.utils import tree_flatten

import runner.process.lean_mlx_lm  # noqa: F401  # registers mlx_lm without its __init__
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level, vocabulary_size, write_tokenizer

Kind = Literal[
    "llama", "qwen3", "gemma3_text", "gemma3",
    "mamba2", "qwen3_next", "falcon_h1", "deepseek_v3", "llama4", "deepseek_v41",
]  # fmt: skip
Dtype = Literal["float32", "bfloat16", "float16"]

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>")
_WORDS = (b"he", b"th", b"the", b" t", b" the", b"in", b"ing", b"er", b" a", b"an", b"and", b" and", b"on", b"re")
TOKENIZER = byte_level([*ALL_BYTES, *_WORDS], SPECIAL_TOKENS)
"""Every byte, a few words, then `SPECIAL_TOKENS`."""

VOCABULARY_SIZE = vocabulary_size(TOKENIZER)
BOS, EOS = (VOCABULARY_SIZE - len(SPECIAL_TOKENS) + index for index in range(2))
GEMMA_WINDOW = 32
"""Sliding window of the Gemma 3 models, in tokens."""
CHUNK = 32
"""Attention chunk of the Llama 4 model, in tokens."""

COMMON: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY_SIZE,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
"""The config of a small decoder."""

_GEMMA3: dict[str, object] = {
    **COMMON,
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10000.0,
    "query_pre_attn_scalar": 16,
    "sliding_window": GEMMA_WINDOW,
    "sliding_window_pattern": 2,
}

CONFIGS: dict[Kind, dict[str, object]] = {
    "llama": {
        **COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    },
    "qwen3": {
        **COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "rope_scaling": None,
    },
    "gemma3_text": {**_GEMMA3, "architectures": ["Gemma3ForCausalLM"]},
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "vocab_size": VOCABULARY_SIZE,
        "text_config": _GEMMA3,
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 32},
    },
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "num_heads": 8,
        "head_dim": 16,
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 16,
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
        "time_step_rank": "auto",
        "max_position_embeddings": 4096,
    },
    "qwen3_next": {
        **COMMON,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [0],
        "moe_intermediate_size": 32,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 2,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "falcon_h1": {
        **COMMON,
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "mamba_d_head": 16,
        "mamba_d_ssm": 128,
        "mamba_d_state": 16,
        "mamba_n_heads": 8,
        "mamba_chunk_size": 32,
        "tie_word_embeddings": False,
    },
    "deepseek_v3": {
        **COMMON,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 16,
    },
    "llama4": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": {
            **COMMON,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "attention_bias": False,
            "attention_chunk_size": CHUNK,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 128,
            "num_experts_per_tok": 1,
            "num_local_experts": 4,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
    },
    "deepseek_v41": {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "compress_ratios": [0, 4, 4],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1],
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 8,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
        "max_position_embeddings": 4096,
    },
}  # fmt: skip

CACHE_KINDS: tuple[Kind, ...] = (
    "llama", "gemma3_text", "mamba2", "qwen3_next", "falcon_h1", "deepseek_v3", "llama4", "deepseek_v41",
)  # fmt: skip
"""One model per kind of layer cache: plain, rotating, arrays, hybrid, lists, latent attention, chunked, unknown."""


def config_of(kind: Kind, overrides: Mapping[str, object] | None = None) -> dict[str, object]:
    """A fresh `config.json` of that kind, with the end-of-sequence id, changed by `overrides` (None deletes a key)."""
    config = copy.deepcopy(CONFIGS[kind])
    config |= {"bos_token_id": BOS, "eos_token_id": EOS}
    for key, value in (overrides or {}).items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    return config


def _with_tagged_floats(value: object) -> object:
    """transformers writes non-finite numbers as objects; the module needs numbers."""
    if isinstance(value, dict):
        return (
            float("inf")
            if value == {"__float__": "Infinity"}
            else {k: _with_tagged_floats(v) for k, v in value.items()}
        )
    return [_with_tagged_floats(item) for item in value] if isinstance(value, list) else value


def make_weights(config: Mapping[str, object], seed: int, dtype: Dtype) -> dict[str, mx.array]:
    """Random parameters of the mlx-lm module that `config["model_type"]` names, under mlx-lm's names."""
    classes = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    module = classes.Model(classes.ModelArgs.from_dict(_with_tagged_floats(copy.deepcopy(dict(config)))))
    weights = {}
    for name, array in cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters())):
        flat = array.ndim == 1 or (array == array.flatten()[0]).all()
        noisy = array + 0.1 * mx.random.normal(array.shape) if flat else array
        weights[name] = noisy.astype(getattr(mx, dtype)) if mx.issubdtype(array.dtype, mx.floating) else array
    mx.eval(weights)
    return weights


def write_checkpoint(
    directory: Path,
    kind: Kind,
    *,
    seed: int = 0,
    dtype: Dtype = "float32",
    overrides: Mapping[str, object] | None = None,
    shards: int = 1,
) -> Path:
    """Writes config, weights and tokenizer into `directory` (made if absent) and returns it.

    `overrides` change top-level config entries before the weights are made. Experts run on the CPU in float32 only, so
    leave `dtype` for models that have them. `shards` > 1 writes `model-00001-of-..` files and their index.
    """
    config = config_of(kind, overrides)
    config["torch_dtype"] = dtype
    return write_directory(directory, config, make_weights(config, seed, dtype), shards)


def write_directory(
    directory: Path, config: Mapping[str, object], weights: Mapping[str, mx.array], shards: int = 1
) -> Path:
    """Writes a model with `TOKENIZER` into `directory` (made if absent) and returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": [EOS]}))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|eos|>"})
    )
    write_tokenizer(directory, TOKENIZER)
    write_weights(directory, weights, shards)
    return directory


def write_weights(directory: Path, weights: Mapping[str, mx.array], shards: int = 1) -> None:
    """Writes `weights` as `model.safetensors`, or as `shards` files with an index."""
    if shards == 1:
        mx.save_safetensors(str(directory / "model.safetensors"), dict(weights), {"format": "mlx"})
        return
    names = sorted(weights)
    places: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[number::shards]}
        mx.save_safetensors(str(directory / file), part, {"format": "mlx"})
        places |= dict.fromkeys(part, file)
    total = sum(array.nbytes for array in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
