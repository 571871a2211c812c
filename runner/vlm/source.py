"""Chooses between mlx-lm and mlx-vlm for a model, from `config.json` alone. Imports neither library."""

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
"""The packages that are served although `family_of` leaves their architectures to Ollama's own runner."""
_TEXTS = ("text_config", "llm_config", "language_config")
_WITHIN = "thinker_config"
"""The part that holds all other parts, in the configs of Qwen's Omni models."""
_UNDESCRIBED = ("fastvlm", "llava_bunny")
"""The packages whose configs may lack `vision_config` although all models of the package see."""
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
"""`model_type` -> the package of mlx-vlm, where its name differs."""


class VlmChoice(NamedTuple):
    """Chooses the family of a model by its config and by the user's settings."""

    unproven: bool = False
    """True to serve also packages and pictures that failed a comparison with mlx-vlm, or had none."""
    media: bool = False
    """True to prefer mlx-vlm for a model that sees only with mlx-vlm, although mlx-lm could serve its texts."""

    @classmethod
    def of(cls, settings: Settings | CheckSettings) -> Self:
        """Returns the choice that follows from `settings`."""
        is_blind = isinstance(settings, Settings) and (settings.no_media or settings.ranks > 1)
        return cls(settings.unproven_models, not is_blind)

    def __call__(self, architecture: str, config: Config, *, from_store: bool) -> Family:
        """Returns the family of mlx-lm, or that of mlx-vlm if mlx-lm lacks the architecture or the vision. Raises
        ModelError if neither library serves the model."""
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
        """Returns the reason why a model sees nothing with mlx-vlm; empty if the model sees."""
        package = package_of(config)
        parts = [part for part in (config, config.get(_WITHIN)) if isinstance(part, dict)]
        described = package in _UNDESCRIBED or any(isinstance(part.get("vision_config"), dict) for part in parts)
        if not package or not described:
            return "a text model"
        return "" if package in SEEING or self.unproven else BLIND.get(package, REFUSED.get(package, ""))


class MlxVlm:
    """The `Library` of all families of mlx-vlm."""

    name, title = LIBRARY, "mlx-vlm"

    def module_config(self, family: Family, read: Callable[[str], Config]) -> Config:
        """Returns the config, with the parts of it that are in other files."""
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
    """Returns the name of mlx-vlm's package for a model; empty if packages.py lists no such package."""
    model_type = config.get("model_type")
    name = _RENAMED.get(model_type, model_type).lower() if isinstance(model_type, str) else ""
    return name if name in COMPARED or name in REFUSED else ""


def mlx_vlm_family(package: str, config: Config) -> Family:
    """Returns the family of a model that a package of mlx-vlm serves."""
    inner = config.get(_WITHIN)
    found = [key for key in _TEXTS if isinstance(config.get(key), dict)]
    found += [f"{_WITHIN}.{key}" for key in _TEXTS if isinstance(inner, dict) and isinstance(inner.get(key), dict)]
    return Family(package, text=found[0] if found else "", library=_MLX_VLM)
