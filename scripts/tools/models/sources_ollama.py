"""Llama, Qwen 3, GLM 4 MoE Lite, Laguna, Nemotron-H and Muse Glimmer: what else Ollama's own runner knows."""

from scripts.tools.models.checkpoints import COMMON, VOCABULARY_SIZE, config_of
from scripts.tools.models.sources_form import Config, Shape, Source, plain, tower
from scripts.tools.models.sources_steps import latent_projections, per_expert, raw_convolutions, renamed, without

_SLIDING, _FULL = "sliding_attention", "full_attention"
_EXPERTS = per_expert("mlp.switch_mlp", "mlp.experts")


def _llama() -> dict[str, Source]:
    config, qwen3 = config_of("llama"), config_of("qwen3")
    # transformers 5 nests what describes the rotation, and leaves a flag out that has its default.
    unsaid = ("rope_theta", "rope_scaling", "tie_word_embeddings")
    modern = {key: value for key, value in config.items() if key not in unsaid}
    scaling = config["rope_scaling"]
    assert isinstance(scaling, dict)
    modern["rope_parameters"] = {**scaling, "rope_theta": 500_000.0}
    prefixed = (renamed((r"", "language_model.")),)
    return {
        "llama": Source(config, config),
        "llama-modern": Source(config | {"rope_theta": 500_000.0}, modern, undo=()),
        "llama-prefixed": Source(
            config,
            config,
            steps=prefixed,
            undo=(renamed((r"language_model\.", "")),),
            leftovers={"language_model.model.layers.0.self_attn.rotary_emb.inv_freq": (8,)},
        ),
        "qwen3": Source(qwen3, qwen3, steps=(without("lm_head"),)),
    }


_GLM: Config = {
    **{key: value for key, value in COMMON.items() if key != "head_dim"},
    "model_type": "glm4_moe_lite",
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_nextn_predict_layers": 1,
}


def _glm() -> dict[str, Source]:
    layer = f"model.layers.{_GLM['num_hidden_layers']}."
    prediction: dict[str, Shape] = {
        f"{layer}embed_tokens.weight": (VOCABULARY_SIZE, 64),
        f"{layer}shared_head.head.weight": (VOCABULARY_SIZE, 64),
        f"{layer}eh_proj.weight": (64, 128),
        f"{layer}enorm.weight": (64,),
        f"{layer}self_attn.kv_b_proj.weight": (256, 64),
        **{f"{layer}mlp.experts.{expert}.down_proj.weight": (64, 64) for expert in range(4)},
    }
    source = plain("Glm4MoeLiteForCausalLM", _GLM)._replace(
        steps=(_EXPERTS, latent_projections), spare=prediction, dense=(".embed_q", ".unembed_out")
    )
    # transformers 5 says elsewhere how fast the rotation is.
    modern = {key: value for key, value in source.config.items() if key != "rope_theta"}
    modern |= {"architectures": ["GLM4MoeLite"], "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
    return {
        "glm4-moe-lite": source,
        "GLM4MoeLite": source._replace(module=_GLM | {"rope_theta": 500_000.0}, config=modern, undo=()),
    }


_LAGUNA: Config = {
    **{key: value for key, value in COMMON.items() if key != "rope_theta"},
    "model_type": "laguna",
    "num_hidden_layers": 3,
    "gating": True,
    "sliding_window": 32,
    "layer_types": [_FULL, _SLIDING, _FULL],
    "num_attention_heads_per_layer": [4, 8, 4],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "rope_parameters": {
        _FULL: {
            "rope_type": "yarn", "rope_theta": 500_000.0, "factor": 4.0, "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 512, "beta_fast": 32.0, "beta_slow": 1.0,
        },
        _SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "moe_routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
}  # fmt: skip

_NEMOTRON: Config = {
    **{key: value for key, value in COMMON.items() if key not in ("rope_theta", "rms_norm_eps", "num_hidden_layers")},
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEM*-",
    "num_hidden_layers": 5,
    "layer_norm_epsilon": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "mamba_proj_bias": False,
    "use_bias": False,
    "use_conv_bias": True,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "ssm_state_size": 32,
    "conv_kernel": 4,
    "n_groups": 2,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 16,  # enough for a router that old releases packed
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


def _nemotron() -> dict[str, Source]:
    raw = (per_expert("mixer.switch_mlp", "mixer.experts", {"fc1": "up_proj", "fc2": "down_proj"}), raw_convolutions)
    prediction: dict[str, Shape] = {
        "mtp.layers.0.enorm.weight": (64,),
        "mtp.layers.0.hnorm.weight": (64,),
        "mtp.layers.0.eh_proj.weight": (64, 128),
        "mtp.layers.0.norm.weight": (64,),
        "mtp.layers.0.mixer.q_proj.weight": (64, 64),
        "mtp.layers.0.mixer.k_proj.weight": (32, 64),
        "mtp.layers.0.mixer.v_proj.weight": (32, 64),
        "mtp.layers.0.mixer.o_proj.weight": (64, 64),
        "mtp.layers.1.norm.weight": (64,),
        "mtp.layers.1.mixer.gate.weight": (16, 64),
        "mtp.layers.1.mixer.gate.e_score_correction_bias": (16,),
        "mtp.layers.1.mixer.shared_experts.up_proj.weight": (64, 64),
        "mtp.layers.1.mixer.shared_experts.down_proj.weight": (64, 64),
        **{
            f"mtp.layers.1.mixer.experts.{expert}.{projection}_proj.weight": (64, 64)
            for expert in range(16)
            for projection in ("up", "down")
        },
        "mtp.layers.1.final_layernorm.weight": (64,),
    }
    vision = {**tower("vision_model.radio_model."), "mlp1.1.weight": (64, 64)}
    sound = {**tower("sound_encoder.encoder."), "sound_projection.linear1.weight": (64, 64)}

    def wrapped(architecture: str, prefix: str, spare: dict[str, Shape]) -> Source:
        config: Config = {
            "architectures": [architecture],
            "model_type": architecture,
            "llm_config": {**_NEMOTRON, "architectures": ["NemotronHForCausalLM"]},
        }
        undo = (without(r"(model\.)?(vision_model|mlp1|sound_\w+)\."), renamed((prefix.replace(".", r"\."), "")))
        return Source(_NEMOTRON, config, steps=(*raw, renamed((r"", prefix))), undo=undo, spare=spare)

    return {
        "nemotron-h": plain("NemotronHForCausalLM", _NEMOTRON)._replace(steps=raw, spare=prediction),
        "nemotron-vl": wrapped("NemotronH_Nano_VL_V2", "language_model.", vision),
        "nemotron-omni": wrapped("NemotronH_Nano_Omni_Reasoning_V3", "language_model.", vision | sound),
        "nemotron-omni-model": wrapped(
            "NemotronH_Nano_Omni_Reasoning_V3",
            "model.language_model.",
            {f"model.{name}": shape for name, shape in (vision | sound).items()},
        ),
    }


_GLIMMER: Config = {
    **{key: value for key, value in COMMON.items() if key != "rope_theta"},
    "model_type": "muse_glimmer_text",
    "num_hidden_layers": 4,
    "sliding_window": 32,
    "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL],
    "qk_scale_factor": 3.87,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "final_logit_softcapping": 20.0,
    "output_multiplier": 0.2,
    "tie_word_embeddings": False,
}


def _glimmer() -> dict[str, Source]:
    vision = {
        **tower("model.vision_tower."),
        "model.vision_adapter.fc1.weight": (64, 64),
        "model.vision_projection.weight": (64, 64),
    }
    config: Config = {"model_type": "muse_glimmer", "text_config": _GLIMMER, "vision_config": {"depth": 1}}
    return {
        "muse-glimmer": plain("MuseGlimmerForConditionalGeneration", config)._replace(
            steps=(renamed((r"model\.", "model.language_model.")),), undo=(without(r"model\.vision_"),), spare=vision
        )
    }


SOURCES = {
    **_llama(),
    **_glm(),
    "laguna": plain("LagunaForCausalLM", _LAGUNA)._replace(
        steps=(
            _EXPERTS,
            renamed(
                (r"(.*)\.mlp\.gate\.proj\.weight", r"\1.mlp.gate.weight"),
                (r"(.*)\.mlp\.gate\.e_score_correction_bias", r"\1.mlp.experts.e_score_correction_bias"),
            ),
        )
    ),
    **_nemotron(),
    **_glimmer(),
}
