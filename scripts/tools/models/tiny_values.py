"""The values in `config.json` of tiny models: one table by field name for all architectures, and the exceptions.

Hidden size 32, 4 layers, 64 tokens, windows of 32 tokens and chunks of 16, so that a prompt of 41 goes beyond both.
"""

from collections.abc import Mapping

Values = dict[str, object]

VOCAB = 64
_LAYERS = 4
_WINDOW = 32
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"

# One quantity has many names.
_NUMBERS: tuple[tuple[float, str], ...] = (
    (VOCAB, "vocab_size vocab_size_per_layer_input num_vocab embedding_size"),
    (_LAYERS, "num_hidden_layers num_layers n_layer n_layers num_transformer_layers"),
    (_WINDOW, "sliding_window sliding_window_size attention_window_size loop_window_size"),
    (16, "attention_chunk_size"),
    (1024, "max_position_embeddings model_max_length n_positions n_ctx block_size"),
    (1e-5, "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps post_norm_eps"),
    # Attention.
    (32, "hidden_size hidden_dim d_model model_dim n_embd block_dim"),
    (4, "num_attention_heads swa_num_attention_heads n_head n_heads num_heads"),
    (2, "num_key_value_heads swa_num_key_value_heads n_kv_heads num_kv_heads num_attention_groups"),
    (8, "head_dim v_head_dim swa_head_dim swa_v_head_dim hidden_size_per_head kv_channels"),
    (8, "qk_rope_head_dim qk_nope_head_dim rotary_dim"),
    (16, "kv_lora_rank q_lora_rank"),
    (10000, "rope_theta rope_local_base_freq rotary_emb_base swa_rope_theta"),
    (0.5, "partial_rotary_factor rotary_pct"),
    (0.35, "attention_multiplier"),
    (2, "index_n_heads"),
    (16, "index_head_dim"),
    (24, "index_topk"),
    # Recurrence.
    (4, "mamba_n_heads mamba_num_heads linear_num_value_heads"),
    (2, "linear_num_key_heads mamba_expand group_norm_size"),
    (8, "mamba_d_head mamba_head_dim linear_key_head_dim linear_value_head_dim"),
    (8, "state_size ssm_state_size mamba_d_state"),
    (32, "mamba_d_ssm"),
    (1, "n_groups mamba_n_groups"),
    (4, "conv_kernel conv1d_width mamba_d_conv linear_conv_kernel_dim"),
    (3, "conv_L_cache"),
    (2, "conv_window"),
    (2, "full_attention_interval layer_group_size"),
    # Feed-forward layers and experts.
    (64, "intermediate_size intermediate_size_mlp mlp_hidden_size ffn_hidden_size dense_intermediate_size n_inner"),
    (64, "ff_intermediate_size block_ff_dim"),
    (32, "moe_intermediate_size moe_hidden_size expert_ffn_hidden_size share_expert_dim shared_intermediate_size"),
    (32, "shared_expert_intermediate_size moe_shared_expert_intermediate_size"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_top_k moe_topk moe_k top_k_experts"),
    (1, "num_shared_experts num_shared_expert n_shared_experts moe_num_shared_experts"),
    (1, "first_k_dense_replace num_dense_layers decoder_sparse_step moe_layer_freq n_group topk_group"),
    # Scales.
    (1, "routed_scaling_factor logits_scaling embedding_multiplier residual_multiplier output_multiplier"),
    (30, "final_logit_softcapping logits_soft_cap"),
    (16, "dim_model_base"),
    (1.4, "scale_depth"),
    (2, "scale_emb"),
)

_SWITCHES = (
    (False, "tie_word_embeddings attention_bias mlp_bias use_bias use_qkv_bias mamba_proj_bias"),
    (True, "use_qk_norm norm_topk_prob use_expert_bias conv_bias use_conv_bias mamba_conv_bias"),
)

_SHARED: Values = {
    **{name: value for value, names in _NUMBERS for name in names.split()},
    **{name: value for value, names in _SWITCHES for name in names.split()},
    "layer_types": [_SLIDING, _FULL] * 2,
    "mlp_only_layers": [0],
    "rope_scaling": None,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "time_step_rank": "auto",
    "time_step_limit": [0.001, 10.0],
}

_YARN: Values = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 512,
    "llama_4_scaling_beta": 0.1,
    "rope_theta": 10000.0,
}
_ROPE: Values = {"rope_type": "default", "rope_theta": 10000.0}
_ROPE_BY_TYPE: Values = {_SLIDING: _ROPE, _FULL: _ROPE}
_DELTA: Values = {
    "linear_attn_config": {"kda_layers": [1, 3], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}
}
_GEMMA4: Values = {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "global_head_dim": 16}
_LFM2: Values = {
    "full_attn_idxs": [1, 3],
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
_LONGCAT: Values = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}

_OWN: Mapping[str, Values] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2]},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": _YARN, "topk_method": "greedy"},
    "deepseek_v41": {
        "head_dim": 32,
        "index_head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "compress_ratios": [0, 4, 0, 4],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3],
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
        "scoring_func": "sqrtsoftplus",
    },
    "exaone4": {"sliding_window_pattern": "LLG", "num_hidden_layers": 3},
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "gemma3": {"sliding_window_pattern": 2},
    "gemma3_text": {"sliding_window_pattern": 2},
    "gemma3n": {
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0, 0, 0],
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
    },
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "glm_moe_dsa": {"rope_parameters": _ROPE},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    },
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "kimi_k3": {**_DELTA, "hidden_act": "situ", "attn_res_block_size": 2},
    "kimi_linear": _DELTA,
    "lfm2": _LFM2,
    "lfm2-vl": _LFM2,
    "lfm2_moe": _LFM2,
    "lille-130m": {"n_embd": 64},  # its feed-forward width is rounded to multiples of 256
    "llama4": {"interleave_moe_layer_step": 2, "num_experts_per_tok": 1},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": {**_LONGCAT, "emb_neighbor_num": 3, "emb_split_num": 2, "ngram_vocab_size_ratio": 4},
    "mellum": {"rope_parameters": _ROPE_BY_TYPE},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    },
    "minicpm3": {"rope_scaling": {"short_factor": 1.0, "long_factor": 1.0, "original_max_position_embeddings": 512}},
    "minimax_m3_vl": {
        "moe_layer_freq": [0, 1, 1, 1],
        "layer_types": [_FULL, "sparse"] * 2,
        "index_block_size": 8,
        "index_topk_blocks": 4,
    },
    "ministral3": {"rope_parameters": _YARN},
    "mistral4": {"rope_parameters": _YARN},
    "muse_spark": {"rope_parameters": _ROPE, "layer_rope_theta": [10000.0, 0] * 2, "num_shared_experts": 0},
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "num_hidden_layers": 3,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
        ],
    },
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "E", "-"]},
    "olmo_hybrid": {"layer_types": [_LINEAR, _FULL] * 2, "linear_allow_neg_eigval": True},
    "openelm": {
        "ffn_dim_divisor": 8,
        "num_query_heads": [4] * _LAYERS,
        "num_kv_heads": [2] * _LAYERS,
        "ffn_multipliers": [1.0] * _LAYERS,
    },
    # Its forward writes to the logits of tokens up to 100351, whatever the vocabulary is.
    "phi3small": {
        "vocab_size": 100352,
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
    },
    "plamo": {"n_shared_head": 2},
    "plamo3": {"sliding_window_pattern": 2},
    # Packed weights come in groups of 128.
    "prism_hadamard_qwen35": {
        "hidden_size": 128,
        "intermediate_size": 128,
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "lm_head", "embedding": False, "dtype": "float16", "block": 0}],
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "num_key_value_heads": 1},
    "rwkv7": dict.fromkeys(("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim"), 8),
    "spark2_5": {"rope_parameters": _ROPE_BY_TYPE, "hidden_act": "gelu"},
}


def values(name: str) -> Values:
    """Every field that the tiny configuration of an architecture may have, a fresh copy."""
    return {"model_type": name, **_SHARED, **_OWN.get(name, {})}
