"""The type that `ollama create -q` gives each tensor, release by release (docs/internals/store.md, 1.6 and 5)."""

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

from scripts.tools.models.tensors import PACKINGS, Quantization

Config = Mapping[str, object]

_EIGHT_BIT: dict[Quantization, Quantization] = {
    "int4": "int8", "int8": "int8", "nvfp4": "mxfp8", "mxfp4": "mxfp8", "mxfp8": "mxfp8",
}  # fmt: skip
_FLOATING = ("nvfp4", "mxfp4", "mxfp8")
_FEW_BITS = ("nvfp4", "mxfp4")
_EXPERTS = (".experts.", ".switch_mlp.", ".shared_experts.")
_SENSITIVE = (".v_proj", ".k_proj", "down_proj")
_VISION = ("vision", ".visual.", "mlp1.", "sound_")
_DENSE = ("embed", "norm", "ln_", "audio_tower")
_ROUTERS = ("mlp.gate.weight", "mixer.gate.weight", "shared_expert_gate.weight", "router.proj.weight")
_LOW_RANK = (".in_proj_a.weight", ".in_proj_b.weight", ".in_proj_ba.weight")


class Rules(NamedTuple):
    """The changes of the generic policy from release to release."""

    eight_bit_head: bool = True
    dense_vision: bool = True
    routers: tuple[str, ...] = _ROUTERS
    promotes_few_bits: bool = True
    families: bool = True
    """True if the rules of a family are those of releases since July 2026."""


class Question(NamedTuple):
    """A tensor of a model, to be packed as `wanted` if that is good for it."""

    name: str
    shape: tuple[int, ...]
    wanted: Quantization
    config: Config
    rules: Rules

    @property
    def eight_bit(self) -> Quantization:
        return _EIGHT_BIT[self.wanted]

    @property
    def is_expert(self) -> bool:
        return any(part in self.name for part in _EXPERTS)

    @property
    def is_vision(self) -> bool:
        return any(part in self.name for part in _VISION)

    @property
    def is_sensitive(self) -> bool:
        return any(part in self.name for part in _SENSITIVE)

    @property
    def is_embedding(self) -> bool:
        return self.name.endswith(("embed_tokens.weight", "backbone.embeddings.weight"))

    def fitting(self, *types: Quantization) -> Quantization | None:
        """The first of `types` whose groups divide a row."""
        return next((kind for kind in types if self.shape[-1] % PACKINGS[kind].group_size == 0), None)

    def number(self, field: str) -> int:
        parts = (self.config, self.config.get("text_config"), self.config.get("llm_config"))
        found = next((part[field] for part in parts if isinstance(part, Mapping) and part.get(field)), 0)
        assert isinstance(found, int)
        return found

    @property
    def is_promoted_layer(self) -> bool:
        """The first and last eighth of the layers, and every third between."""
        match, layers = re.search(r"\.layers\.(\d+)\.", self.name), self.number("num_hidden_layers")
        layer, first = int(match[1]) if match else -1, layers // 8
        return layer >= 0 and (layer < first or layer >= 7 * layers // 8 or (layer - first) % 3 == 2)


Policy = Callable[[Question], Quantization | None]


def generic(question: Question) -> Quantization | None:
    """Applies the rules for every family that has none of its own."""
    name, shape, wanted, _, rules = question
    expert = question.is_expert and not name.endswith((".bias", ".scale"))
    if not expert and (not name.endswith(".weight") or any(part in name for part in _DENSE)):
        return None
    if not (len(shape) == 2 or (len(shape) == 3 and expert)) or math.prod(shape) < 1024:
        return None
    if name.endswith(rules.routers) or (rules.dense_vision and question.is_vision):
        return None
    if rules.eight_bit_head and name.endswith("lm_head.weight"):
        return question.fitting(question.eight_bit)
    few = wanted in _FEW_BITS and rules.promotes_few_bits and not expert
    if question.is_sensitive and (wanted == "int4" or few):
        return question.fitting(question.eight_bit, wanted)
    return question.fitting(wanted)


def _qwen(question: Question) -> Quantization | None:
    """The low-rank projections of linear attention stay dense."""
    return None if question.name.endswith(_LOW_RANK) else generic(question)


def _early_qwen(question: Question) -> Quantization | None:
    """Qwen 3.5 before July 2026: embeddings too, nothing promoted; the floating types spare delicate tensors."""
    name, shape, wanted, *_ = question
    if name.startswith("vision_tower.") or not (question.is_expert or name.endswith(".weight")) or "norm" in name:
        return None
    if not (len(shape) == 2 or (len(shape) == 3 and question.is_expert)) or math.prod(shape) < 1024:
        return None
    delicate = ("embed_tokens.weight", "lm_head.weight", *_LOW_RANK, "mlp.gate.weight", "shared_expert_gate.weight")
    return None if wanted in _FLOATING and name.endswith(delicate) else question.fitting(wanted)


def _gemma4(question: Question) -> Quantization | None:
    """Embeddings in 8 bits; values, keys and outputs of some layers too."""
    if question.is_embedding:
        return question.fitting(question.eight_bit, question.wanted)
    experts = question.number("num_experts")
    if question.is_sensitive and question.eight_bit != question.wanted and not question.is_vision and experts <= 8:
        if "audio" in question.name:
            return None
        keys = ".k_proj" in question.name
        promoted = experts == 8 if keys else question.is_promoted_layer
        return question.fitting(*((question.eight_bit, question.wanted) if promoted else (question.wanted,)))
    return generic(question)


def _glimmer(question: Question) -> Quantization | None:
    """Embeddings and attention in 8 bits."""
    if question.is_vision:
        return None
    if question.is_embedding:
        return question.fitting(question.eight_bit, question.wanted)
    attention = any(f".self_attn.{part}_proj" in question.name for part in "qkvo")
    if question.eight_bit != question.wanted and (attention or ".mlp.down_proj" in question.name):
        promoted = attention or question.is_promoted_layer
        return question.fitting(*((question.eight_bit, question.wanted) if promoted else (question.wanted,)))
    return generic(question)


def _laguna(question: Question) -> Quantization | None:
    """Floating types: embeddings in 8 bits; mxfp8 spares attention, shared outputs and some routed ones."""
    name, _, wanted, *_ = question
    if wanted not in _FLOATING:
        return generic(question)
    if question.is_embedding or name.endswith("lm_head.weight"):
        return question.fitting(question.eight_bit)
    if not name.endswith("_proj.weight"):
        return None
    if ".self_attn." in name:
        return None if wanted == "mxfp8" else question.fitting(wanted)
    if name.endswith(".shared_expert.down_proj.weight"):
        return (
            None
            if wanted == "mxfp8"
            else question.fitting(question.eight_bit if question.is_promoted_layer else wanted)
        )
    if wanted == "mxfp8" and ".experts." in name and "down_proj" in name and question.is_promoted_layer:
        return None
    return question.fitting(wanted)


def _nemotron(question: Question) -> Quantization | None:
    """Embeddings in 8 bits; four bits of the floating types are too few for the outputs of some layers."""
    if question.is_vision:
        return None
    if question.is_embedding:
        return question.fitting(question.eight_bit)
    ends = (".out_proj.weight", ".o_proj.weight", ".v_proj.weight", ".down_proj.weight")
    if question.wanted in _FEW_BITS and ".mixer." in question.name and question.name.endswith(ends):
        return question.fitting(
            *((question.eight_bit, question.wanted) if question.is_promoted_layer else (question.wanted,))
        )
    return generic(question)


_FAMILIES: dict[str, tuple[Policy, Policy]] = {
    "Qwen3_5": (_qwen, _early_qwen),
    "Qwen3Next": (_qwen, _early_qwen),
    "Gemma4": (_gemma4, _gemma4),
    "gemma4_unified": (_gemma4, _gemma4),
    "Laguna": (_laguna, generic),
    "NemotronH": (_nemotron, generic),
    "MuseGlimmer": (_glimmer, _glimmer),
}
"""Prefixes of architectures -> their rules since July 2026, and those before."""


def type_of(question: Question) -> Quantization | None:
    names = cast("list[str]", question.config.get("architectures") or [""])
    pair = next((pair for begin, pair in _FAMILIES.items() if names[0].startswith(begin)), (generic, generic))
    return pair[0 if question.rules.families else 1](question)
