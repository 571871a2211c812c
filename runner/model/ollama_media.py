"""Models that take pictures or sound in Ollama's own runner. Here they are text models, all of them."""

from collections.abc import Collection

from runner.model.families import FAMILIES, UNNEEDED
from runner.model.opened import OpenedModel

_PACKAGES = {
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "muse_glimmer": "glimmer",
    "nemotron_h": "nemotron_h",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_next": "qwen3_5",
}
"""mlx-lm module -> the package of Ollama's sources that runs the same architectures."""
_KINDS = {
    "pictures": ("vision", "vision_config", _PACKAGES.values()),
    "sound": ("audio", "audio_config", ("gemma4",)),
}
"""Kind of media -> its tensors (a key of UNNEEDED), what describes them in config.json, the packages that serve it."""


def ollama_media(model: OpenedModel, packages: Collection[str]) -> str:
    """The media that Ollama's runner takes for `model`, if these packages of it take any: `pictures`, `sound`,
    `pictures and sound`, or nothing.

    Decided as that runner does, by config.json and tensors, of which it needs both: hosts leave some families'
    capabilities out of what they tell.
    """
    package = _PACKAGES.get(model.family.module) if model.architecture in FAMILIES else None
    if package not in packages:
        return ""
    return " and ".join(
        kind
        for kind, (part, description, serving) in _KINDS.items()
        if package in serving
        and isinstance(model.config.get(description), dict)
        and any(map(UNNEEDED[part].match, model.checkpoint.tensors))
    )
