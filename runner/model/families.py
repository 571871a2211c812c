"""Which mlx-lm module runs an architecture, and what has to be undone between the two. One row per architecture.

An architecture without a row runs on the module that its `model_type` names, if mlx-lm has one, names as they are.
"""

import importlib.util
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import runner.mlxlm  # noqa: F401  # registers mlx_lm, so that looking for a module does not import all of it
from runner.errors import ModelError
from runner.model.checkpoint import Tensor

Config = dict[str, object]

_DROPPED = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|embed_vision|embed_audio)\."
    r"|(.+\.)?mtp\."
    r"|.+\.rotary_emb\.inv_freq$"
)
"""Tensors that no text model needs: vision, audio, multi-token prediction, precomputed rotary frequencies."""


class Family(NamedTuple):
    """How one architecture maps to mlx-lm.

    `text` is the key of the config object that describes the text model, "" for the top level. `required` are fields
    that mlx-lm cannot do without, or has a wrong default for. `renames` turn a prefix of a tensor name into another
    (the first that fits). `head` is the output projection, after renaming. `adapt` mends the text config for mlx-lm.
    """

    module: str
    text: str = ""
    required: tuple[str, ...] = ()
    defaults: Mapping[str, object] = {}
    renames: tuple[tuple[str, str], ...] = ()
    head: str = "lm_head.weight"
    context_default: int = 0
    adapt: Callable[[Config], None] | None = None

    @property
    def has_row(self) -> bool:
        """Whether the rules above were written for this architecture, or are the general ones."""
        return bool(self.required)


def _adapt_gemma3(text: Config) -> None:
    """transformers 5 lists `layer_types` where mlx-lm wants the period of the full-attention layers."""
    if text.get("sliding_window", 1) is None:
        raise ModelError("config.json: sliding_window is null, want a number of tokens")
    types = text.get("layer_types")
    if "sliding_window_pattern" in text or not isinstance(types, list):
        return
    full = [index for index, kind in enumerate(types) if kind == "full_attention"]
    period = full[0] + 1 if full else 0
    if not full or full != list(range(period - 1, len(types), period)):
        raise ModelError(f"config.json: layer_types must have full attention at a fixed period, found {types}")
    text["sliding_window_pattern"] = period


_SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size")
_HEADS = (*_SIZES, "num_attention_heads", "rms_norm_eps")
_UNWRAPPED = (("language_model.", ""),)
_GEMMA3_WRAPPED = (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."))

_LLAMA = Family("llama", required=_HEADS, renames=_UNWRAPPED)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": Family(
        "qwen3",
        required=(*_HEADS, "num_key_value_heads", "rope_theta"),
        # Fields that mlx-lm demands: the width has transformers' default, the length is only for our own limit.
        defaults={"head_dim": 128, "max_position_embeddings": 0},
        renames=_UNWRAPPED,
    ),
    "Gemma3ForCausalLM": Family("gemma3_text", required=_SIZES, renames=_UNWRAPPED, adapt=_adapt_gemma3),
    "Gemma3ForConditionalGeneration": Family(
        "gemma3",
        text="text_config",
        required=_SIZES,
        renames=_GEMMA3_WRAPPED,
        head="language_model.lm_head.weight",
        context_default=131072,
        adapt=_adapt_gemma3,
    ),
}

_MODULES = {
    "mistral": "llama", "xverse": "llama", "iquestcoder": "llama", "llava": "mistral3", "phi-msft": "phixtral",
    "falcon_mamba": "mamba", "joyai_llm_flash": "deepseek_v3", "kimi_k2": "deepseek_v3", "qwen2_5_vl": "qwen2_vl",
    "minimax_m2": "minimax", "gemma4_unified": "gemma4", "deepseek_v41_text": "deepseek_v41",
}  # fmt: skip
"""`model_type` -> mlx-lm module, where the names differ."""


def architecture_of(config: Config, *, from_store: bool) -> str:
    """The first entry of `architectures`. A directory without any goes by its `model_type`, as mlx-lm does."""
    names = config.get("architectures")
    if isinstance(names, str):
        names = [names]
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    model_type = config.get("model_type")
    if from_store or not isinstance(model_type, str):
        raise ModelError("no architectures found in config.json")
    module = _MODULES.get(model_type, model_type)
    return next((name for name, family in FAMILIES.items() if family.module == module), model_type)


def family_of(architecture: str, config: Config) -> Family:
    """The row of `architecture`, else the general one for `model_type`. Raises ModelError if mlx-lm has no module."""
    family = FAMILIES.get(architecture)
    if family is not None:
        return family
    model_type = config.get("model_type")
    module = _MODULES.get(model_type, model_type) if isinstance(model_type, str) else ""
    if architecture == "BailingMoeV3ForCausalLM" and module == "bailing_hybrid":
        module = "bailing_moe_v3"
    # The name comes from a file: one plain component, so that nothing but a module of mlx_lm.models is ever imported.
    if not re.fullmatch(r"[A-Za-z0-9][\w-]*", module) or importlib.util.find_spec(f"mlx_lm.models.{module}") is None:
        raise ModelError(f"unsupported architecture: {architecture}")
    text = next((key for key in ("text_config", "llm_config") if isinstance(config.get(key), dict)), "")
    return Family(module, text=text)


def select_tensors(family: Family, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that the text model needs, under the names that its module's `sanitize` understands."""
    if not family.has_row:
        return dict(tensors)
    chosen: dict[str, Tensor] = {}
    for tensor in tensors.values():
        if _DROPPED.match(tensor.name):
            continue
        name = _renamed(family, tensor.name)
        if name in chosen:
            raise ModelError(f"tensor {name} is in the model twice: {chosen[name].weight.file}, {tensor.weight.file}")
        chosen[name] = tensor._replace(name=name)
    return chosen


def _renamed(family: Family, name: str) -> str:
    for old, new in family.renames:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
