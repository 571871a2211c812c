"""Tiny models that see and hear, as Hugging Face publishes them: text models of the other sources with whole towers.

The tensors of a tower have the names and shapes of the source: convolutions are [out, in, (time,) y, x].
"""

from collections.abc import Mapping
from typing import cast

from scripts.tools.models import data
from scripts.tools.models.sources_form import ENCODERS, SOURCES, Config, Shape, Source, tensors

_TOWERS = data.read("towers")
TEXT_WIDTH = 64
QWEN_VISION: Config = _TOWERS["qwen_vision"]
NEMOTRON_VISION: Config = _TOWERS["nemotron_vision"]
NEMOTRON_AROUND: Config = _TOWERS["nemotron_around"]
"""The fields of a Nemotron-H omni about its tower that are not in `vision_config`."""
_CLASS_TOKENS = 4
"""Of three teachers and a multiple of four: three, and one register."""
_PATCH_VALUES = 3 * 16 * 16


def qwen_tensors(root: str = "model.visual.", text_width: int = TEXT_WIDTH, **changes: object) -> dict[str, Shape]:
    """The tensors of a Qwen tower; `changes` are of `QWEN_VISION`."""
    config = cast("Mapping[str, int]", {**QWEN_VISION, **changes})
    width, hidden, merged = config["hidden_size"], config["intermediate_size"], 4 * config["hidden_size"]
    shapes: dict[str, Shape] = {
        "patch_embed.proj.weight": (width, 3, 2, 16, 16),
        "patch_embed.proj.bias": (width,),
        "pos_embed.weight": (config["num_position_embeddings"], width),
        **_norm("merger.norm", width),
        **_linear("merger.linear_fc1", merged, merged),
        **_linear("merger.linear_fc2", merged, text_width),
    }
    for index in range(config["depth"]):
        shapes |= _block(f"blocks.{index}.", width, hidden, "linear_fc")
    return {f"{root}{name}": shape for name, shape in shapes.items()}


def nemotron_tensors(prefix: str = "", **changes: object) -> dict[str, Shape]:
    """The tensors of a RADIO tower and its projector; `changes` are of `NEMOTRON_VISION`."""
    config = cast("Mapping[str, int]", {**NEMOTRON_VISION, **changes})
    width, hidden, side = config["hidden_size"], config["intermediate_size"], 96 // 16
    radio = "vision_model.radio_model.model."
    shapes: dict[str, Shape] = {
        "vision_model.radio_model.summary_idxs": (3,),
        "vision_model.radio_model.input_conditioner.norm_mean": (3, 1, 1),
        "vision_model.radio_model.input_conditioner.norm_std": (3, 1, 1),
        f"{radio}patch_generator.embedder.weight": (width, _PATCH_VALUES),
        f"{radio}patch_generator.video_embedder.weight": (width, 2 * _PATCH_VALUES),
        f"{radio}patch_generator.cls_token.token": (_CLASS_TOKENS, width),
        f"{radio}patch_generator.pos_embed": (1, side * side, width),
        "mlp1.0.weight": (4 * width,),
        "mlp1.1.weight": (cast("int", NEMOTRON_AROUND["projector_hidden_size"]), 4 * width),
        "mlp1.3.weight": (TEXT_WIDTH, cast("int", NEMOTRON_AROUND["projector_hidden_size"])),
    }
    for index in range(config["num_hidden_layers"]):
        shapes |= _block(f"{radio}blocks.{index}.", width, hidden, "fc")
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def _block(prefix: str, width: int, hidden: int, layer: str) -> dict[str, Shape]:
    return {
        **_norm(f"{prefix}norm1", width),
        **_linear(f"{prefix}attn.qkv", width, 3 * width),
        **_linear(f"{prefix}attn.proj", width, width),
        **_norm(f"{prefix}norm2", width),
        **_linear(f"{prefix}mlp.{layer}1", width, hidden),
        **_linear(f"{prefix}mlp.{layer}2", hidden, width),
    }


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear(name: str, in_dims: int, out_dims: int) -> dict[str, Shape]:
    return {f"{name}.weight": (out_dims, in_dims), f"{name}.bias": (out_dims,)}


_QWEN_TOKENS: Config = {"vision_start_token_id": 60, "vision_end_token_id": 61, "image_token_id": 62}


def _qwen(name: str) -> Source:
    source = SOURCES[name]
    spare = {key: shape for key, shape in source.spare.items() if "visual" not in key}
    vision: Config = {"vision_config": QWEN_VISION, **_QWEN_TOKENS}
    return source._replace(
        module={**source.module, **vision} if "vision_config" in source.module else source.module,
        config={**source.config, **vision},
        spare={**spare, **qwen_tensors()},
    )


def _nemotron(name: str, prefix: str) -> Source:
    source = SOURCES[name]
    spare = {key: shape for key, shape in source.spare.items() if "vision_model" not in key and "mlp1" not in key}
    vision: Config = {"vision_config": NEMOTRON_VISION, "img_context_token_id": 62, **NEMOTRON_AROUND}
    return source._replace(
        config={**source.config, **vision},
        spare={**spare, **nemotron_tensors(prefix)},
        tokens={"<img>": 5, "</img>": 6},
    )


SEEING: dict[str, Source] = {
    "qwen3.5-seeing": _qwen("qwen3.5"),
    "qwen3.5-moe-seeing": _qwen("qwen3.5-moe"),
    "qwen3-next-seeing": _qwen("qwen3-next-wrapped"),
    "nemotron-omni-seeing": _nemotron("nemotron-omni", ""),
    "nemotron-omni-model-seeing": _nemotron("nemotron-omni-model", "model."),
}
"""Sources with a whole tower, by a short name of ours."""

_GEMMA_TOKENS: Config = {"boi_token_id": 60, "eoi_token_id": 61, "image_token_id": 62}


def _seeing(name: str, tower: str, vision: Config, text: Config, around: Config) -> Source:
    """Returns a source with a whole tower instead of parts of one.

    `tower` is a table of sources.toml; `text` is added to the source's `text_config`, `around` to its config.
    """
    source = SOURCES[name]
    inner = {**cast("Config", source.config["text_config"]), **text}
    spare = {name: shape for name, shape in source.spare.items() if "vision" not in name}
    config = {**source.config, "text_config": inner, "vision_config": vision, **around}
    return source._replace(config=config, spare={**spare, **tensors(tower, "model.")})


_CLAMPED: Config = {**_TOWERS["gemma4_vision"], "use_clipped_linears": True}
_STANDARD: Config = {**_TOWERS["gemma4_vision"], "standardize": True}
_BOTH_WAYS: Config = {"use_bidirectional_attention": "vision"}
_GLIMMER: Config = {"image_token_id": 62, **_TOWERS["glimmer_around"]}
SEEING_GEMMAS: dict[str, Source] = {
    # e2b and e4b: inputs for each layer, clamps, causal.
    "gemma4-seeing": _seeing("gemma4", "gemma4_clamped_tower", _CLAMPED, {}, _GEMMA_TOKENS),
    # 26B-A4B: experts, a picture's tokens see each other in sliding layers.
    "gemma4-moe-seeing": _seeing("gemma4-moe", "gemma4_standard_tower", _STANDARD, _BOTH_WAYS, _GEMMA_TOKENS),
    "gemma4-unified-seeing": _seeing(
        "gemma4-unified", "unified_tower", _TOWERS["unified_vision"], _BOTH_WAYS, _GEMMA_TOKENS
    ),
    "glimmer-seeing": _seeing("muse-glimmer", "glimmer_tower", _TOWERS["glimmer_vision"], {}, _GLIMMER)._replace(
        tokens={"<|image_start|>": 5, "<|image_end|>": 6}
    ),
}
"""The same of Gemma 4 and Glimmer. Glimmer's tokens around a picture are the tokenizer's, not of its config."""

_HEARING_TOKENS: Config = {"boa_token_id": 57, "eoa_token_index": 59, "audio_token_id": 63}


def _hearing(name: str, tower: str, audio: Config) -> Source:
    """Returns a source that sees with a whole tower for sound, too. `tower` is a table of sources.toml."""
    source = SEEING_GEMMAS[name]
    spare = {name: shape for name, shape in source.spare.items() if "audio" not in name}
    config = {**source.config, "audio_config": audio, **_HEARING_TOKENS}
    return source._replace(config=config, spare={**spare, **tensors(tower, "model.")})


def _embedding() -> Source:
    """Returns the encoder with whole towers."""
    source = ENCODERS["embedding-gemma2"]
    towers: Config = {"vision_config": _STANDARD, "audio_config": _TOWERS["gemma4_audio"]}
    spare = {**tensors("gemma4_standard_tower", "model."), **tensors("conformer_tower", "model.")}
    return source._replace(config={**source.config, **towers, **_GEMMA_TOKENS, **_HEARING_TOKENS}, spare=spare)


HEARING: dict[str, Source] = {
    "gemma4-hearing": _hearing("gemma4-seeing", "conformer_tower", _TOWERS["gemma4_audio"]),
    "gemma4-unified-hearing": _hearing("gemma4-unified-seeing", "unified_sound_tower", _TOWERS["unified_audio"]),
}
"""Sources of Gemma 4 that see and hear."""
EMBEDDING: dict[str, Source] = {"embedding-gemma2-media": _embedding()}
"""Encoders with whole towers."""
