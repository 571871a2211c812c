"""Tiny models of Gemma 4 and Glimmer that see, as Hugging Face publishes them: text models with a whole tower.

Glimmer's tokens around a picture are the tokenizer's, `<|image_start|>` and `<|image_end|>`, not of its config.
"""

from typing import cast

from scripts.tools.models import data
from scripts.tools.models.sources_form import SOURCES, Config, Source, tensors

_TOWERS = data.read("towers")
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
SEEING: dict[str, Source] = {
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
"""Sources with a whole tower, by a short name of ours."""
