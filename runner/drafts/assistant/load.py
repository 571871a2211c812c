"""Opens an assistant by its headers, checks that it fits its target, and loads it."""

import re
from collections.abc import Mapping
from functools import partial
from typing import cast

import mlx.core as mx
from mlx_lm.models.gemma4_text import ModelArgs

from runner.drafts.assistant.drafter import Assistant, AssistantDrafter, AssistantModule, Shared, Sizes, places_of
from runner.drafts.target import target_of
from runner.errors import ModelError
from runner.logs import error_line
from runner.model.config import text_config
from runner.model.families import Config, Family
from runner.model.opened import OpenedModel, open_checkpoint
from runner.model.sources.checkpoint import Checkpoint
from runner.model.weights.assemble import placeholders
from runner.model.weights.dtype import DtypePlan
from runner.model.weights.load import LoadedModel
from runner.model.weights.packed import Arrays
from runner.model.weights.parameters import parameters_of
from runner.model.weights.part import assemble_part, load_part, plan_part

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
_ORDERING = "masked_embedding.token_ordering"


def is_assistant(architecture: str, config: Config) -> bool:
    """Returns True if a model with this `config.json` is an assistant."""
    return architecture in _ARCHITECTURES or _BACKBONE in config


def open_assistant(checkpoint: Checkpoint) -> OpenedModel:
    """Interprets the checkpoint of an assistant. Raises ModelError."""
    opened = open_checkpoint(checkpoint, family=_FAMILY)
    tensors = {name: tensor for name, tensor in opened.tensors.items() if not _LEFTOVERS.match(name)}
    if not _is_tied(opened):
        tensors.pop("model.embed_tokens.weight", None)
    _sizes_of(opened)
    _kinds_of(opened)
    return opened._replace(tensors=tensors)


def _is_tied(opened: OpenedModel) -> bool:
    """Returns True if an assistant scores tokens with its table of embeddings, which it needs for nothing else."""
    return text_config(opened.module_config, opened.family).get("tie_word_embeddings") is True


def _kinds_of(opened: OpenedModel) -> list[str]:
    """Returns the kind of each layer of an assistant. Raises ModelError if `config.json` does not say it."""
    text = text_config(opened.module_config, opened.family)
    kinds, count = text.get("layer_types"), text.get("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != count or not all(isinstance(kind, str) for kind in kinds):
        raise ModelError(f"config.json: layer_types must name the kind of each of the {count} layers, found {kinds!r}")
    return kinds


def _sizes_of(opened: OpenedModel) -> Sizes:
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


def check_assistant(opened: OpenedModel, target: OpenedModel, loaded: LoadedModel) -> None:
    """Raises ModelError unless an assistant fits the target, which may be made of placeholders."""
    rehearsed, places = _assembled(opened, placeholders(opened)), places_of(loaded.module)
    width = cast("int", target_of(loaded).norm["weight"].shape[0])
    backbone = _sizes_of(opened).backbone
    if backbone != width:
        raise ModelError(f"it drafts for a model that is {backbone} wide, and this one is {width} wide")
    if opened.vocab_size != target.vocab_size:
        raise ModelError(
            f"it has another vocabulary than the model: {opened.vocab_size} tokens instead of {target.vocab_size}"
        )
    for layer in rehearsed.model.layers:
        kind, place = layer.layer_type, places.get(layer.layer_type)
        if place is None:
            raise ModelError(f"it looks at layers of {kind}, of which the model has none")
        attention = layer.self_attn
        if attention.head_dim != place.width or attention.n_heads % place.heads:
            raise ModelError(
                f"its {attention.n_heads} heads of {attention.head_dim} numbers cannot look at the model's"
                f" {place.heads} heads of {place.width} ({kind})"
            )


def load_assistant(
    opened: OpenedModel,
    loaded: LoadedModel,
    dtype: str = "keep",
    budget_bytes: int | None = None,
    *,
    slow_blas: bool = False,
) -> AssistantDrafter:
    """Loads an assistant that `check_assistant` let pass, for a target that is loaded.

    The arguments are those of `weights.load.load`, with what the target has left of the budget. Raises ModelError, and
    what MLX raises at the first forward.
    """
    module = load_part(opened, partial(_assembled, opened), "the assistant", dtype, budget_bytes, slow_blas=slow_blas)
    _check_ordering(module)
    kinds = frozenset(_kinds_of(opened))
    assistant = Assistant(module, target_of(loaded), places_of(loaded.module), kinds, loaded.suppressed)
    mx.eval(_dummy_step(assistant))
    return AssistantDrafter(opened.name, assistant)


def plan_assistant(
    opened: OpenedModel, dtype: str, budget_bytes: int | None, *, slow_blas: bool
) -> tuple[AssistantModule, DtypePlan]:
    """Returns an assistant made of placeholders, and the types of its weights. Raises ModelError if anything does not
    fit, or exceeds the budget."""
    return plan_part(opened, partial(_assembled, opened), dtype, budget_bytes, slow_blas=slow_blas)


def _assembled(opened: OpenedModel, arrays: Mapping[str, Arrays]) -> AssistantModule:
    """Builds the module with `arrays`, which stay lazy. Raises ModelError if anything does not fit."""
    return assemble_part(opened, lambda weights: (_built(opened), weights), arrays)


def _built(opened: OpenedModel) -> AssistantModule:
    text = text_config(opened.module_config, opened.family)
    layers = len(_kinds_of(opened))
    # No layer of an assistant has keys and values, experts, or inputs of its own.
    fixed = {"num_kv_shared_layers": layers, "hidden_size_per_layer_input": 0, "enable_moe_block": False}
    try:
        return AssistantModule(ModelArgs.from_dict({**text, **fixed}), _sizes_of(opened), tied=_is_tied(opened))
    except Exception as error:
        raise ModelError(f"config.json does not fit an assistant: {error_line(error)}") from error


def _check_ordering(module: AssistantModule) -> None:
    """Raises ModelError unless each token is in one group: MLX reads any place, whatever is there."""
    ordering = parameters_of(module).get(_ORDERING)
    if ordering is not None and not mx.array_equal(mx.sort(ordering), mx.arange(ordering.size)).item():
        raise ModelError(f"tensor {_ORDERING} does not name each token once")


def _dummy_step(assistant: Assistant) -> tuple[mx.array, mx.array]:
    """Returns the logits and the state of one step: MLX refuses some layers only when they compute."""
    tokens = mx.zeros((1, 1), mx.uint32)
    hidden = assistant.target.embed(tokens)
    shared = {
        kind: Shared(*(mx.zeros((1, place.heads, 1, place.width), hidden.dtype) for _ in range(2)))
        for kind, place in assistant.places.items()
    }
    return assistant.step(tokens, hidden, shared, 0)
