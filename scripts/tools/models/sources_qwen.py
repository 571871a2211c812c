"""Qwen 3.5, dense and with experts, and Qwen3-Next: linear attention, zero-centred norms, token prediction."""

from scripts.tools.models.checkpoints import COMMON
from scripts.tools.models.sources_form import Config, Shape, Source, plain, tower
from scripts.tools.models.sources_steps import (
    centred_norms,
    fused_experts,
    per_expert,
    raw_convolutions,
    renamed,
    stacked_experts,
    without,
)

_ROPE: Config = {"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25}
_LINEAR: Config = {
    **{key: value for key, value in COMMON.items() if key != "rope_theta"},
    "rms_norm_eps": 1e-6,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "tie_word_embeddings": False,
}
_EXPERTS: Config = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
}
_DENSE: Config = {**_LINEAR, "model_type": "qwen3_5_text", "rope_parameters": _ROPE}
_MOE: Config = {**_DENSE, **_EXPERTS, "model_type": "qwen3_5_moe_text"}
_NEXT: Config = {
    **_LINEAR,
    **_EXPERTS,
    "model_type": "qwen3_next",
    "rope_theta": 1_000_000.0,
    "partial_rotary_factor": 0.25,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

_PREDICTION: dict[str, Shape] = {
    "mtp.fc.weight": (64, 128),
    "mtp.norm.weight": (64,),
    "mtp.pre_fc_norm_embedding.weight": (64,),
    "mtp.pre_fc_norm_hidden.weight": (64,),
    "mtp.layers.0.input_layernorm.weight": (64,),
    "mtp.layers.0.post_attention_layernorm.weight": (64,),
    "mtp.layers.0.self_attn.q_proj.weight": (128, 64),
    "mtp.layers.0.self_attn.k_proj.weight": (32, 64),
    "mtp.layers.0.self_attn.v_proj.weight": (32, 64),
    "mtp.layers.0.self_attn.o_proj.weight": (64, 64),
    "mtp.layers.0.self_attn.q_norm.weight": (16,),
    "mtp.layers.0.self_attn.k_norm.weight": (16,),
}
_PREDICTION_DENSE: dict[str, Shape] = {
    **_PREDICTION,
    "mtp.layers.0.mlp.gate_proj.weight": (128, 64),
    "mtp.layers.0.mlp.up_proj.weight": (128, 64),
    "mtp.layers.0.mlp.down_proj.weight": (64, 128),
}
_PREDICTION_SHARED: dict[str, Shape] = {
    **_PREDICTION,
    "mtp.layers.0.mlp.gate.weight": (4, 64),
    "mtp.layers.0.mlp.shared_expert_gate.weight": (1, 64),
    **{f"mtp.layers.0.mlp.shared_expert.{projection}_proj.weight": (64, 64) for projection in ("gate", "up", "down")},
}
_PREDICTION_MOE: dict[str, Shape] = {
    **_PREDICTION_SHARED,
    "mtp.layers.0.mlp.experts.gate_up_proj": (4, 128, 64),
    "mtp.layers.0.mlp.experts.down_proj": (4, 64, 64),
}
_PREDICTION_SEPARATE: dict[str, Shape] = {
    **_PREDICTION_SHARED,
    **{
        f"mtp.layers.0.mlp.experts.{expert}.{projection}_proj.weight": (64, 64)
        for expert in range(4)
        for projection in ("gate", "up", "down")
    },
}

_RAW = (centred_norms, raw_convolutions)
_FLAT = renamed((r"language_model\.", ""))
_IN_MODEL = renamed((r"language_model\.model\.", "model.language_model."), (r"language_model\.lm_head", "lm_head"))
_FUSED = fused_experts("mlp.switch_mlp", "mlp.experts")
_SEPARATE = per_expert("mlp.switch_mlp", "mlp.experts")


def _wrapped(text: Config, model_type: str) -> Config:
    return {"model_type": model_type, "text_config": text, "vision_config": {"depth": 1}}


def _causal(text: Config, architecture: str, module: str) -> Source:
    """A text-only export: its `model_type` is one that mlx-lm has no module for."""
    return plain(architecture, {**text, "model_type": module}, model_type=text["model_type"])._replace(undo=())


_NEXT_SOURCE = plain("Qwen3NextForCausalLM", _NEXT)._replace(steps=(*_RAW, _SEPARATE), spare=_PREDICTION_SEPARATE)
# transformers 5 nests what describes the rotation.
_NEXT_MODERN: Config = {
    **{key: value for key, value in _NEXT.items() if key not in ("rope_theta", "partial_rotary_factor")},
    "architectures": ["Qwen3NextMoeForCausalLM"],
    "rope_parameters": _ROPE,
}


SOURCES = {
    "qwen3.5-text": _causal(_DENSE, "Qwen3_5ForCausalLM", "qwen3_5")._replace(
        steps=(*_RAW, _FLAT), spare=_PREDICTION_DENSE
    ),
    "qwen3.5": plain("Qwen3_5ForConditionalGeneration", _wrapped(_DENSE, "qwen3_5"))._replace(
        steps=(*_RAW, _IN_MODEL), spare={**tower("model.visual."), **_PREDICTION_DENSE}
    ),
    "qwen3.5-visual": plain("Qwen3_5ForConditionalGeneration", _wrapped(_DENSE, "qwen3_5"))._replace(
        steps=(*_RAW, _IN_MODEL),
        undo=(without(r"visual\."),),
        spare=tower("visual."),
    ),
    "qwen3.5-moe-text": _causal(_MOE, "Qwen3_5MoeForCausalLM", "qwen3_5_moe")._replace(
        steps=(*_RAW, _FUSED, _FLAT), spare=_PREDICTION_MOE
    ),
    "qwen3.5-moe": plain("Qwen3_5MoeForConditionalGeneration", _wrapped(_MOE, "qwen3_5_moe"))._replace(
        steps=(*_RAW, _FUSED, _IN_MODEL), spare={**tower("model.visual."), **_PREDICTION_MOE}
    ),
    "qwen3.5-moe-separate": plain("Qwen3_5MoeForConditionalGeneration", _wrapped(_MOE, "qwen3_5_moe"))._replace(
        steps=(*_RAW, _SEPARATE, _IN_MODEL),
        undo=(stacked_experts("mlp.experts", "mlp.switch_mlp"), without(r"mtp\.")),
        spare={**tower("model.visual."), **_PREDICTION_SEPARATE},
    ),
    "qwen3-next": _NEXT_SOURCE,
    "qwen3-next-moe": _NEXT_SOURCE._replace(config=_NEXT_MODERN, undo=()),
    "qwen3-next-wrapped": Source(
        _NEXT,
        {**_wrapped(_NEXT, "qwen3_next"), "architectures": ["Qwen3NextForConditionalGeneration"]},
        steps=(*_RAW, _SEPARATE, renamed((r"model\.", "model.language_model."))),
        undo=(
            without(r"model\.visual\."),
            renamed((r"model\.language_model\.", "model.")),
        ),
        spare={**tower("model.visual."), **_PREDICTION_SEPARATE},
    ),
}
