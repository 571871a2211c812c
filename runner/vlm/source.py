"""Chooses between mlx-lm and mlx-vlm for a model, from `config.json` alone. Imports neither."""

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Self

from runner.errors import ModelError
from runner.model.architectures import DECIDERS, OLLAMA_ONLY, Config, Family, family_of
from runner.settings import CheckSettings, Settings
from runner.vlm import LIBRARY, NOT_INSTALLED
from runner.vlm.packages import BATCHED, BLIND, COMPARED, DRAFTED, REFUSED, SEEING

if TYPE_CHECKING:
    from runner.vlm.module import Served

OLLAMA_ONLY_TOO = ("qwen4_exp", *DECIDERS.values())
"""The packages of architectures that otherwise only Ollama's own runner serves."""
_TEXTS = ("text_config", "llm_config", "language_config")
_WITHIN = "thinker_config"
"""The part of a config of Qwen's Omni models that holds the others."""
_UNDESCRIBED = ("fastvlm", "llava_bunny")
"""Packages whose configs may lack the vision part although all of their models see."""
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
"""`model_type` -> mlx-vlm's package of another name."""


class VlmChoice(NamedTuple):
    """Chooses the family of a model by its configuration and the wishes of a user."""

    unproven: bool = False
    """Serves packages of mlx-vlm that were not compared with it, too."""
    media: bool = False
    """Prefers mlx-vlm for a model that sees with it alone, although mlx-lm could serve its texts."""

    @classmethod
    def of(cls, settings: Settings | CheckSettings) -> Self:
        """Returns the choice by these settings."""
        is_blind = isinstance(settings, Settings) and (settings.no_media or settings.ranks > 1)
        return cls(settings.unproven_models, not is_blind)

    def __call__(self, architecture: str, config: Config, *, from_store: bool) -> Family:
        """Returns the family: mlx-lm's, or mlx-vlm's if mlx-lm has none or sees nothing. Raises ModelError if neither
        serves it."""
        package = DECIDERS.get(architecture) or package_of(config)
        try:
            family = family_of(architecture, config, from_store=from_store)
        except ModelError:
            if not package or (architecture in OLLAMA_ONLY and package not in OLLAMA_ONLY_TOO):
                raise
        else:
            if not self.media or self.blindness(config):
                return family
            return mlx_vlm_family(package, config) if _is_installed() else family._replace(unseen=NOT_INSTALLED)
        refused = f"unsupported architecture: {architecture}, which mlx-vlm has"
        compared = COMPARED.union(DECIDERS.values())
        if package not in compared and not self.unproven:
            raise ModelError(f"{refused}: {REFUSED[package]}; --unproven-models serves it all the same")
        if not _is_installed():
            raise ModelError(f"{refused}: {NOT_INSTALLED}")
        return mlx_vlm_family(package, config)

    def blindness(self, config: Config) -> str:
        """Returns the reason why a model sees nothing with mlx-vlm; empty if it sees."""
        package = package_of(config)
        parts = [part for part in (config, config.get(_WITHIN)) if isinstance(part, dict)]
        described = package in _UNDESCRIBED or any(isinstance(part.get("vision_config"), dict) for part in parts)
        if not package or not described:
            return "a text model"
        return "" if package in SEEING or self.unproven else BLIND.get(package, REFUSED.get(package, ""))


class MlxVlm:
    """The `Library` of its families."""

    name, title = LIBRARY, "mlx-vlm"

    def module_config(self, family: Family, read: Callable[[str], Config]) -> Config:
        """Returns the configuration with the parts that stand in other files."""
        config = read("config.json")
        if family.module == DECIDERS["ClefForDecision"]:
            return {**config, "head_config": read("joint_head_config.json")}
        if family.module == DECIDERS["LayaForDecision"]:
            decides = read("rl_agent_config.json")
            parts = {"encoder_config": read("encoder/config.json"), "decision_config": decides}
            return {**config, **parts, **{key: decides[key] for key in ("head_layers",) if key in decides}}
        return config

    def make_module(self, module: str, config: Config) -> "Served":
        from runner.vlm.module import make_module

        return make_module(module, config)

    def why_not(self, module: str, *, batches: bool) -> str:
        if module in (BATCHED if batches else DRAFTED):
            return ""
        return f"{LIBRARY}.models.{module} did not give the same answers in a trial"


_MLX_VLM = MlxVlm()


def _is_installed() -> bool:
    return importlib.util.find_spec(LIBRARY) is not None


def package_of(config: Config) -> str:
    """Returns the name of mlx-vlm's package for a model; empty if none is known here."""
    model_type = config.get("model_type")
    name = _RENAMED.get(model_type, model_type).lower() if isinstance(model_type, str) else ""
    return name if name in COMPARED or name in REFUSED else ""


def mlx_vlm_family(package: str, config: Config) -> Family:
    """Returns the family of a model of this package."""
    inner = config.get(_WITHIN)
    found = [key for key in _TEXTS if isinstance(config.get(key), dict)]
    found += [f"{_WITHIN}.{key}" for key in _TEXTS if isinstance(inner, dict) and isinstance(inner.get(key), dict)]
    return Family(package, text=found[0] if found else "", library=_MLX_VLM)
