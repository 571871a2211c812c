"""Opens an assistant by its headers."""

import re
from typing import NamedTuple

from runner.errors import ModelError
from runner.model.config import text_config
from runner.model.families import Config, Family
from runner.model.opened import OpenedModel, open_checkpoint
from runner.model.sources.checkpoint import Checkpoint

_ARCHITECTURES = frozenset({
    "Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM", "gemma4_assistant", "gemma4_unified_assistant",
})  # fmt: skip
_FAMILY = Family(
    "gemma4_text",
    text="text_config",
    required=("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size"),
    defaults={"head_dim": 256},
)
"""Its layers are those of Gemma 4's text model."""
_LEFTOVERS = re.compile(r"model\.layers\.\d+\.self_attn\.(?:[kv]_proj|k_norm)\.")
"""Keys and values that no assistant computes."""
_BACKBONE = "backbone_hidden_size"
_CENTROIDS = {"num_centroids": 2048, "centroid_intermediate_top_k": 32}


class Sizes(NamedTuple):
    """What `config.json` says of an assistant beside its text model."""

    backbone: int
    """The width of the target's hidden states."""
    centroids: int
    """The number of groups of tokens; 0 if every token is scored."""
    chosen: int
    """The number of groups whose tokens are scored."""


def is_named_assistant(architecture: str, config: Config) -> bool:
    """Returns True if a model with this `config.json` is an assistant."""
    return architecture in _ARCHITECTURES or _BACKBONE in config


def is_assistant(opened: OpenedModel) -> bool:
    """Returns True for an assistant."""
    return opened.family is _FAMILY


def open_assistant(checkpoint: Checkpoint) -> OpenedModel:
    """Interprets the checkpoint of an assistant. Raises ModelError."""
    opened = open_checkpoint(checkpoint, family=_FAMILY)
    tensors = {name: tensor for name, tensor in opened.tensors.items() if not _LEFTOVERS.match(name)}
    if not is_tied(opened):
        tensors.pop("model.embed_tokens.weight", None)
    sizes_of(opened)
    kinds_of(opened)
    return opened._replace(tensors=tensors)


def is_tied(opened: OpenedModel) -> bool:
    """Returns True if an assistant scores tokens with its table of embeddings, which it needs for nothing else."""
    return text_config(opened.module_config, opened.family).get("tie_word_embeddings") is True


def kinds_of(opened: OpenedModel) -> list[str]:
    """Returns the kind of each layer of an assistant. Raises ModelError if `config.json` does not say it."""
    text = text_config(opened.module_config, opened.family)
    kinds, count = text.get("layer_types"), text.get("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != count or not all(isinstance(kind, str) for kind in kinds):
        raise ModelError(f"config.json: layer_types must name the kind of each of the {count} layers, found {kinds!r}")
    return kinds


def sizes_of(opened: OpenedModel) -> Sizes:
    """Returns the sizes of an assistant. Raises ModelError if they make no sense."""
    config = opened.config
    backbone = _positive(config, _BACKBONE, None)
    if config.get("use_ordered_embeddings") is not True:
        return Sizes(backbone, 0, 0)
    centroids, chosen = (_positive(config, name, default) for name, default in _CENTROIDS.items())
    if opened.vocab_size % centroids or chosen > centroids:
        raise ModelError(
            f"config.json: {opened.vocab_size} tokens cannot be in {centroids} groups of one size, {chosen} of them"
            " chosen"
        )
    return Sizes(backbone, centroids, chosen)


def _positive(config: Config, name: str, default: int | None) -> int:
    found = config.get(name, default)
    if type(found) is not int or found < 1:
        raise ModelError(f"config.json: invalid {name}: {found!r}")
    return found
