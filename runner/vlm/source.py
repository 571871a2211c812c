"""Chooses whether a model is one of mlx-lm's or of mlx-vlm's, from `config.json` alone. Imports neither."""

import importlib.util
from collections.abc import Callable
from typing import NamedTuple, Self

from runner.errors import ModelError
from runner.model.families import DECIDERS, OLLAMA_ONLY, Config, Family, family_of
from runner.settings import CheckSettings, Settings
from runner.vlm.packages import BATCHED, BLIND, COMPARED, DRAFTED, REFUSED, SEEING

LIBRARY = "mlx_vlm"
NOT_INSTALLED = "mlx-vlm is not installed: pip install --no-deps --require-hashes -r requirements/vlm.lock"
OLLAMA_ONLY_TOO = ("qwen4_exp", *DECIDERS.values())
"""The packages of architectures that else only Ollama's own runner serves."""
_TEXTS = ("text_config", "llm_config", "language_config")
_WITHIN = "thinker_config"
"""The part of a config of Qwen's Omni models in which the others are."""
_UNDESCRIBED = ("fastvlm", "llava_bunny")
"""Packages whose configs may leave the vision part to the class: all of their models see."""
_RENAMED = {
    "bunny-llama": "llava_bunny",
    "cohere2_vision": "aya_vision",
    "granite-vision": "granite_vision",
    "granite4-vision": "granite4_vision",
    "jvlm": "jina_vlm",
    "lfm2-vl": "lfm2_vl",
    "llava-qwen2": "llava_bunny",
    "llava_qwen2": "fastvlm",
    "moondream1": "moondream2",
    "phi4-siglip": "phi4_siglip",
}
"""`model_type` -> mlx-vlm's package, where the names differ."""


class Choice(NamedTuple):
    """The wishes of a user that decide."""

    unproven: bool = False
    """Packages of mlx-vlm that were not compared with it may be served too."""
    media: bool = False
    """A model that sees with mlx-vlm alone is mlx-vlm's, although mlx-lm could serve its texts."""

    @classmethod
    def of(cls, settings: Settings | CheckSettings) -> Self:
        """Returns what these settings ask for."""
        is_blind = isinstance(settings, Settings) and (settings.no_media or settings.ranks > 1)
        return cls(settings.unproven_models, not is_blind)


USUAL = Choice()


def package_of(config: Config) -> str:
    """Returns the name of mlx-vlm's package for a model; empty if it is none that is known here."""
    model_type = config.get("model_type")
    name = _RENAMED.get(model_type, model_type).lower() if isinstance(model_type, str) else ""
    return name if name in COMPARED or name in REFUSED else ""


def choose_family(architecture: str, config: Config, *, from_store: bool, choice: Choice) -> Family:
    """Returns the family of a model: mlx-lm's, or mlx-vlm's if mlx-lm has none or sees nothing. Raises ModelError if
    neither serves it."""
    package = DECIDERS.get(architecture) or package_of(config)
    try:
        family = family_of(architecture, config, from_store=from_store)
    except ModelError:
        if not package or (architecture in OLLAMA_ONLY and package not in OLLAMA_ONLY_TOO):
            raise
    else:
        sees = choice.media and not blindness(config, choice)
        return mlx_vlm_family(package, config) if sees and importlib.util.find_spec(LIBRARY) else family
    refused = f"unsupported architecture: {architecture}, which mlx-vlm has"
    compared = COMPARED.union(DECIDERS.values())
    if package not in compared and not choice.unproven:
        raise ModelError(f"{refused}: {REFUSED[package]}; --unproven-models serves it all the same")
    if importlib.util.find_spec(LIBRARY) is None:
        raise ModelError(f"{refused}: {NOT_INSTALLED}")
    return mlx_vlm_family(package, config)


def blindness(config: Config, choice: Choice) -> str:
    """Returns why mlx-vlm lets a model see nothing here, once it is installed; empty if it would see."""
    package = package_of(config)
    parts = [part for part in (config, config.get(_WITHIN)) if isinstance(part, dict)]
    described = package in _UNDESCRIBED or any(isinstance(part.get("vision_config"), dict) for part in parts)
    if not package or not described:
        return "a text model"
    return "" if package in SEEING or choice.unproven else BLIND.get(package, REFUSED.get(package, ""))


def with_parts(family: Family, config: Config, part: Callable[[str], Config]) -> Config:
    """Returns the config of a model of mlx-vlm with what stands in other files than `config.json`; `part` reads one."""
    if family.module == DECIDERS["ClefForDecision"]:
        return {**config, "head_config": part("joint_head_config.json")}
    if family.module == DECIDERS["LayaForDecision"]:
        decides = part("rl_agent_config.json")
        parts = {"encoder_config": part("encoder/config.json"), "decision_config": decides}
        return {**config, **parts, **{key: decides[key] for key in ("head_layers",) if key in decides}}
    return config


def mlx_vlm_family(package: str, config: Config) -> Family:
    """Returns the family of a model as one of this package."""
    inner = config.get(_WITHIN)
    found = [key for key in _TEXTS if isinstance(config.get(key), dict)]
    found += [f"{_WITHIN}.{key}" for key in _TEXTS if isinstance(inner, dict) and isinstance(inner.get(key), dict)]
    return Family(package, text=found[0] if found else "", library=LIBRARY)


def why_not(package: str, *, batches: bool) -> str:
    """Returns the reason why answers of a package must not share a forward, or not be drafted; empty if they may."""
    if package in (BATCHED if batches else DRAFTED):
        return ""
    return f"mlx_vlm.models.{package} did not give the same answers in a trial"
