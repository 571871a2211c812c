"""Recognises models that take pictures or sound in Ollama's own runner. This runner serves them as text models."""

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
"""Kind of media -> its tensors (a key of UNNEEDED), its description in config.json, the packages that serve it."""


def ollama_media(model: OpenedModel, packages: Collection[str]) -> str:
    """Returns the media that Ollama's runner takes for `model`: `pictures`, `sound`, `pictures and sound`, or nothing.

    `packages` are the packages of Ollama's runner that take media. Like that runner, this requires both a description
    in config.json and tensors; the capabilities that hosts list are incomplete for some families.
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
