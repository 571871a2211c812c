"""Gemma 3 and Gemma 4 in every form that was published."""

from scripts.tools.models.checkpoints import CONFIGS, VOCABULARY_SIZE, config_of
from scripts.tools.models.sources_form import Config, Shape, Source, plain, tower
from scripts.tools.models.sources_steps import fused_experts, renamed, without

_SLIDING, _FULL = "sliding_attention", "full_attention"
_VISION = {**tower("vision_tower.vision_model."), "multi_modal_projector.mm_input_projection_weight": (64, 64)}
_IN_MODEL = (r"language_model\.model\.", "model.language_model.")
_OUT_OF_MODEL = (r"model\.language_model\.", "language_model.model.")


def _inside(tensors: dict[str, Shape]) -> dict[str, Shape]:
    return {f"model.{name}": shape for name, shape in tensors.items()}


def _gemma3() -> dict[str, Source]:
    text, wrapped = config_of("gemma3_text"), config_of("gemma3")
    inner = CONFIGS["gemma3"]["text_config"]
    assert isinstance(inner, dict)
    # transformers 5 lists the kinds of layers, nests the rope of each kind and says nothing at the top level.
    modern_text = {key: value for key, value in inner.items() if "rope" not in key and key != "sliding_window_pattern"}
    modern_text |= {
        "layer_types": [_SLIDING, _FULL] * 2,
        "rope_parameters": {
            _FULL: {"rope_type": "default", "rope_theta": 500_000.0},
            _SLIDING: {"rope_type": "default", "rope_theta": 20_000.0},
        },
    }
    meant = {**wrapped, "text_config": {**inner, "rope_theta": 500_000.0, "rope_local_base_freq": 20_000.0}}
    modern = {key: value for key, value in wrapped.items() if key != "vocab_size"} | {"text_config": modern_text}
    headless = without(r"(language_model\.)?lm_head")
    return {
        "gemma3-text": Source(text, text, steps=(headless,)),
        "gemma3": Source(wrapped, wrapped, steps=(headless,), spare=_VISION),
        "gemma3-model": Source(
            meant,
            modern,
            steps=(headless, renamed(_IN_MODEL)),
            undo=(renamed(_OUT_OF_MODEL), without(r"model\.")),
            spare=_inside(_VISION),
        ),
    }


_GEMMA4: Config = {
    "model_type": "gemma4_text",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY_SIZE,
    "vocab_size_per_layer_input": VOCABULARY_SIZE,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "sliding_window": 32,
    "layer_types": [_SLIDING, _FULL] * 2,
    "rope_parameters": {
        _FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
        _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    },
    "attention_k_eq_v": False,
    "final_logit_softcapping": 30.0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
_SHARED: Config = {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
_SAME: Config = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_EXPERTS: Config = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}


def _leftovers(prefix: str) -> dict[str, Shape]:
    """Keys and values of layers that take those of an earlier layer; mlx-lm has no place for them."""
    return {
        f"{prefix}layers.{layer}.self_attn.{name}": shape
        for layer, width in ((2, 16), (3, 32))
        for name, shape in (
            ("k_proj.weight", (2 * width, 64)),
            ("v_proj.weight", (2 * width, 64)),
            ("k_norm.weight", (width,)),
        )
    }


def _wrapped(text: Config) -> Config:
    return {"model_type": "gemma4", "vocab_size": VOCABULARY_SIZE, "text_config": text, "vision_config": {}}


def _gemma4() -> dict[str, Source]:
    towers = _inside(
        {
            **tower("vision_tower."),
            "vision_tower.layers.0.self_attn.q_proj.input_max": (1,),
            "embed_vision.embedding_projection.weight": (64, 64),
            **tower("audio_tower."),
            "embed_audio.embedding_projection.weight": (64, 64),
        }
    )
    embedder = {"model.vision_embedder.patch_projection.weight": (64, 64), "model.embed_vision.weight": (64, 64)}
    shared, moe, same = _GEMMA4 | _SHARED, _GEMMA4 | _SAME | _EXPERTS, _GEMMA4 | _SAME
    everything = _GEMMA4 | _SHARED | _EXPERTS | {"num_experts": 16}  # more than 8: no expert is promoted
    fused, inside = fused_experts("experts.switch_glu", "experts"), renamed(_IN_MODEL)
    separate = renamed((r"(.*)\.experts\.switch_glu\.(\w+)\.weight", r"\1.moe.\2"))
    joined = renamed((r"(.*)\.moe\.(\w+_proj)$", r"\1.experts.switch_glu.\2.weight"))
    wrapped = "Gemma4ForConditionalGeneration"
    unified = "Gemma4UnifiedForConditionalGeneration"
    return {
        "gemma4-text": plain("Gemma4ForCausalLM", shared)._replace(leftovers=_leftovers("model.")),
        "gemma4-text-moe": plain("Gemma4ForCausalLM", moe)._replace(steps=(fused,)),
        "gemma4": plain(wrapped, _wrapped(shared))._replace(
            steps=(inside,), spare=towers, leftovers=_leftovers("model.language_model.")
        ),
        "gemma4-moe": plain(wrapped, _wrapped(moe))._replace(steps=(fused, inside), spare=towers),
        "gemma4-moe-separate": plain(wrapped, _wrapped(moe))._replace(
            steps=(separate, inside), undo=(joined,), spare=towers
        ),
        "gemma4-unified": plain(unified, _wrapped(same), model_type="gemma4_unified")._replace(
            steps=(inside,), spare=embedder
        ),
        "gemma4-unified-text": Source(
            shared,
            {**shared, "architectures": ["Gemma4UnifiedForCausalLM"], "model_type": "gemma4_unified_text"},
            undo=(),
            leftovers=_leftovers("model."),
        ),
        "gemma4_unified": plain("gemma4_unified", _wrapped(everything), model_type="gemma4_unified")._replace(
            steps=(fused, inside), spare=embedder, leftovers=_leftovers("model.language_model.")
        ),
    }


SOURCES = {**_gemma3(), **_gemma4()}
