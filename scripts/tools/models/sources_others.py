"""Architectures that Ollama's runner refuses, though `ollama create` takes them and mlx-lm runs them."""

import mlx.core as mx

from scripts.tools.models.checkpoints import COMMON, VOCABULARY_SIZE, config_of
from scripts.tools.models.sources_form import Config, Shape, plain, tower
from scripts.tools.models.sources_steps import (
    Weights,
    latent_projections,
    per_expert,
    raw_convolutions,
    renamed,
    transposed,
    without,
)

_EXPERTS = per_expert("mlp.switch_mlp", "mlp.experts")
_MOE: Config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_QWEN3: Config = {**_MOE, "num_experts": 12, "decoder_sparse_step": 1, "mlp_only_layers": [0]}
_DEEPSEEK: Config = {
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
_LATENT: Config = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}


def _prediction(layer: int) -> dict[str, Shape]:
    """A layer after the last: what GLM 4 and DeepSeek 3 predict further tokens with."""
    return {
        f"model.layers.{layer}.eh_proj.weight": (64, 128),
        f"model.layers.{layer}.enorm.weight": (64,),
        f"model.layers.{layer}.self_attn.o_proj.weight": (64, 64),
    }


def _blocks(weights: Weights) -> Weights:
    """GPT-OSS publishes its experts in mxfp4, gate and up rows in turn, as bytes: `_blocks` [E, n, in/32, 16]."""
    result = dict(weights)
    for name in weights:
        if not name.endswith(".mlp.experts.gate_proj.weight"):
            continue
        head = name.removesuffix("gate_proj.weight")
        pairs = {}
        for kind in ("weight", "bias"):
            gate, up = result.pop(f"{head}gate_proj.{kind}"), result.pop(f"{head}up_proj.{kind}")
            pairs[kind] = mx.stack([gate, up], axis=2).flatten(1, 2)
        down = {kind: result.pop(f"{head}down_proj.{kind}") for kind in ("weight", "bias")}
        for projection, parts in (("gate_up_proj", pairs), ("down_proj", down)):
            words, scales, *_ = mx.quantize(parts["weight"], 32, 4, mode="mxfp4")
            result[f"{head}{projection}_blocks"] = words.view(mx.uint8).reshape(*scales.shape, 16)
            result[f"{head}{projection}_scales"] = scales
            result[f"{head}{projection}_bias"] = parts["bias"]
    return result


def _joined_experts(weights: Weights) -> Weights:
    """Granite MoE: `switch_mlp.{gate,up}_proj` [E, n, in] are one `input_linear` [E, 2n, in]."""
    result = dict(weights)
    for name in weights:
        if name.endswith(".switch_mlp.gate_proj.weight"):
            head = name.removesuffix("switch_mlp.gate_proj.weight")
            gate, up, down = (result.pop(f"{head}switch_mlp.{part}_proj.weight") for part in ("gate", "up", "down"))
            result[f"{head}input_linear.weight"] = mx.concatenate([gate, up], axis=1)
            result[f"{head}output_linear.weight"] = down
    return result


def _columns(weights: Weights) -> Weights:
    """Llama 4 publishes its experts with inputs first: `gate_up_proj` [E, in, 2n] and `down_proj` [E, n, out]."""
    result = dict(weights)
    for name in weights:
        if name.endswith(".experts.gate_proj.weight"):
            head = name.removesuffix("gate_proj.weight")
            gate, up, down = (result.pop(f"{head}{part}_proj.weight").swapaxes(1, 2) for part in ("gate", "up", "down"))
            result[f"{head}gate_up_proj"] = mx.concatenate([gate, up], axis=-1)
            result[f"{head}down_proj"] = down
    return result


_SWITCH = (".experts.gate_proj", ".experts.up_proj", ".experts.down_proj")
_MULTIPLIED = (*(f".{part}_proj" for part in ("q", "k", "o", "gate", "down", "in", "out")), "lm_head")
_W = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_LLAMA4 = config_of("llama4")
_LLAMA4_TEXT = _LLAMA4["text_config"]
assert isinstance(_LLAMA4_TEXT, dict)
_LLAMA4_TEXT["num_local_experts"] = 16  # enough for a router that is packed
_GPT2: Config = {
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_positions": 1024,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": VOCABULARY_SIZE,
}
_LFM2: Config = {
    "model_type": "lfm2",
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 128,
    "block_multiple_of": 64,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", "full_attention"],
}
_GRANITE: Config = {
    "logits_scaling": 2.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "attention_bias": False,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
_GPT_OSS: Config = {
    **COMMON,
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 64,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}
_COHERE: Config = {"layer_norm_eps": 1e-5, "logit_scale": 0.25, "sliding_window": 32, "sliding_window_pattern": 2}


def _common(model_type: str, **more: object) -> Config:
    return {**COMMON, "model_type": model_type, "tie_word_embeddings": False, **more}


SOURCES = {
    "qwen2": plain("Qwen2ForCausalLM", _common("qwen2")),
    "mistral": plain("MistralForCausalLM", _common("llama"), model_type="mistral"),
    "phi3": plain("Phi3ForCausalLM", _common("phi3")),
    "cohere2": plain("Cohere2ForCausalLM", _common("cohere2", **_COHERE)),
    "qwen3-moe": plain("Qwen3MoeForCausalLM", _common("qwen3_moe", **_QWEN3))._replace(steps=(_EXPERTS,)),
    "olmoe": plain("OlmoeForCausalLM", _common("olmoe", **_MOE, intermediate_size=64))._replace(steps=(_EXPERTS,)),
    "mixtral": plain("MixtralForCausalLM", _common("mixtral", num_local_experts=4, num_experts_per_tok=2))._replace(
        steps=(per_expert("block_sparse_moe.switch_mlp", "block_sparse_moe.experts", _W),)
    ),
    "deepseek-v3": plain("DeepseekV3ForCausalLM", _common("deepseek_v3", **_DEEPSEEK, **_LATENT))._replace(
        steps=(_EXPERTS, latent_projections),
        undo=(without(r"model\.layers\.2\."),),  # mlx-lm knows that of the published model only, which is number 61
        spare=_prediction(2),
        dense=(".embed_q", ".unembed_out"),
    ),
    "glm4-moe": plain(
        "Glm4MoeForCausalLM",
        _common(
            "glm4_moe", **_DEEPSEEK, use_qk_norm=True, attention_bias=True, partial_rotary_factor=0.5, rope_scaling=None
        ),
    )._replace(steps=(_EXPERTS,), spare=_prediction(2)),
    "gpt-oss": plain("GptOssForCausalLM", _GPT_OSS, quantization_config={"quant_method": "mxfp4"})._replace(
        steps=(_blocks,)
    ),
    "llama4": plain("Llama4ForConditionalGeneration", _LLAMA4)._replace(
        steps=(_columns,),
        spare={**tower("vision_model."), "multi_modal_projector.linear_1.weight": (64, 64)},
        dense=_SWITCH,
    ),
    "granite-moe": plain("GraniteMoeForCausalLM", _common("granitemoe", **_GRANITE, intermediate_size=64))._replace(
        steps=(_joined_experts,)
    ),
    "falcon-h1": plain("FalconH1ForCausalLM", config_of("falcon_h1"))._replace(
        steps=(raw_convolutions,), dense=_MULTIPLIED
    ),
    "mamba2": plain("Mamba2ForCausalLM", config_of("mamba2"))._replace(steps=(raw_convolutions, without("lm_head"))),
    "lfm2": plain("Lfm2ForCausalLM", _LFM2)._replace(steps=(raw_convolutions,)),
    "gpt2": plain("GPT2LMHeadModel", _GPT2)._replace(
        steps=(
            renamed((r"model\.", "")),
            transposed("c_attn.weight", "c_proj.weight", "c_fc.weight"),
        ),
        dense=(".c_attn", ".c_proj", ".c_fc"),
        leftovers={f"h.{layer}.attn.bias": (1, 1, 16, 16) for layer in range(2)},
    ),
}
