"""Recognises models that take pictures or sound in Ollama's own runner, and those that only that runner can serve."""

from collections.abc import Collection
from typing import Literal

from runner.model.families import FAMILIES, UNNEEDED
from runner.model.opened import OpenedModel

Kind = Literal["pictures", "sound"]

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
_KINDS: dict[Kind, tuple[str, str, Collection[str]]] = {
    "pictures": ("vision", "vision_config", _PACKAGES.values()),
    "sound": ("audio", "audio_config", ("gemma4",)),
}
"""Kind of media -> its tensors (a key of UNNEEDED), its description in config.json, the packages that serve it."""


def ollama_media(model: OpenedModel, packages: Collection[str]) -> set[Kind]:
    """Returns the kinds of media that Ollama's runner takes for `model`.

    `packages` are the packages of Ollama's runner that take media. Like that runner, this requires both a description
    in config.json and tensors; the capabilities that hosts list are incomplete for some families.
    """
    package = _PACKAGES.get(model.family.module) if model.architecture in FAMILIES else None
    if package not in packages:
        return set()
    return {
        kind
        for kind, (part, description, serving) in _KINDS.items()
        if package in serving
        and isinstance(model.config.get(description), dict)
        and any(map(UNNEEDED[part].match, model.checkpoint.tensors))
    }


def unknown_tower(model: OpenedModel) -> str:
    """Returns why only Ollama's runner may be able to load the tower of a model that has one; "" if this one can, or
    if no runner could: tensors or fields are missing, say."""
    try:
        from runner.model.towers import plan_tower  # needs MLX
    except ImportError:
        return ""  # whoever loads the model tells this
    plan = plan_tower(model)
    if plan is None:
        return "its tower is of no known family"
    return plan.fault if plan.unknown else ""
