"""Removes `null` fields from a config, except where null is a value to the module that reads it."""

from runner.model.families import Config

_MEANT: dict[str, frozenset[str]] = {
    "q_lora_rank": frozenset(
        {
            *("bailing_moe_v3", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k25", "kimi_vl"),
            *("mistral3", "mistral4", "youtu_llm"),
        }
    ),
    "n_routed_experts": frozenset({"glm4_moe", "glm4_moe_lite", "mistral3", "mistral4", "solar_open"}),
    "n_shared_experts": frozenset({"glm4_moe", "glm4_moe_lite", "mistral3", "mistral4", "solar_open"}),
    "num_experts": frozenset({"bailing_hybrid", "bailing_moe", "bailing_moe_linear"}),
    "num_shared_experts": frozenset({"exaone_moe"}),
    "num_key_value_heads": frozenset({"gear", "lfm2", "lfm2-vl", "mixtral", "olmo_hybrid", "phi", "recurrent_gemma"}),
    "head_dim": frozenset({"glm", "helium"}),
    "global_head_dim": frozenset({"gemma4", "gemma4_text"}),
    "hidden_size_per_layer_input": frozenset({"gemma4", "gemma4_text"}),
    "final_logit_softcapping": frozenset({"gemma4", "gemma4_text"}),
    "logits_soft_cap": frozenset({"recurrent_gemma"}),
    "layer_types": frozenset({"gear"}),
    "rope_scaling": frozenset({"exaone4"}),
    "rope_theta": frozenset({"kimi_linear", "olmo_hybrid"}),
    "rotary_dim": frozenset({"gptj"}),
}
"""Field -> the mlx-lm modules to which its null is a value, although their classes have another default or none.

Examples: queries that are not compressed, no shared experts, as many key heads as heads. A test tries every field of
every module.
"""


def without_nulls(value: Config) -> Config:
    """Returns `value` without the null fields that have no meaning to any module."""
    return {key: item for key, item in value.items() if item is not None or key in _MEANT}


def drop_nulls(config: Config, module: str) -> None:
    """Removes the null fields from `config` that have no meaning to mlx-lm's `module`."""
    for key in [key for key, item in config.items() if item is None and module not in _MEANT.get(key, ())]:
        del config[key]
