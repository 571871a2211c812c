"""Reads the headers of a DFlash draft: `config.json`, and the names of the tensors."""

from itertools import pairwise
from typing import NamedTuple

from runner.errors import ModelError
from runner.model.architectures import Config, Family, architecture_of
from runner.model.fields import first_size, positive, required_token, section, size
from runner.model.module_config import read_config
from runner.model.opened import OpenedModel
from runner.model.packing import check_companions
from runner.model.sources.checkpoint import LogicalTensor, ModelCheckpoint

LAGUNA, GLIMMER = "DFlashLagunaForCausalLM", "MuseGlimmerAssistantModel"
ARCHITECTURES = frozenset({"DFlashDraftModel", LAGUNA, GLIMMER})
_SLIDING, _FULL = "sliding_attention", "full_attention"
_MOST_LAYERS = 64
_MOST_BLOCK = 256
_MOST_TOKENS = 1 << 31


class Rope(NamedTuple):
    """The parameters of the rotary embedding, which gives queries and keys their positions."""

    width: int
    base: float
    scaling: Config | None
    """The fields of `config.json` from which mlx-lm computes the scaling; None without scaling."""
    most_tokens: int
    interleaved: bool
    """True if each number is rotated together with its neighbour, False if together with one of the other half."""


class DFlashConfig(NamedTuple):
    """The sizes and rules by which a DFlash draft computes, and what it expects of its target."""

    width: int
    """The width of the hidden states of the draft, and of those of the target."""
    inner_width: int
    heads: int
    key_heads: int
    head_width: int
    eps: float
    rope: Rope
    windows: tuple[int, ...]
    """For each layer, the number of tokens to which a row attends, with the row's own; 0 if it attends to all."""
    causal: tuple[bool, ...]
    """For each layer, True if a row of a block attends only to itself and earlier rows, False if to all rows."""
    context_norm: bool
    """True if each layer normalizes the context by the norm of the layer's own input."""
    block: int
    """The most rows of a block: one for the last token of the text, and one for each draft."""
    mask_token: int
    taps: tuple[int, ...]
    """The layers of the target, by number, whose outputs become the context."""
    target_layers: int
    """The number of layers of the target; 0 if unknown."""
    vocab_size: int
    """The number of tokens in the target's vocabulary; 0 if unknown."""


def read_dflash_config(config: Config, architecture: str) -> DFlashConfig:
    """Reads the fields of `config`, the draft's `config.json`. Raises ModelError for missing and invalid fields."""
    nested = config.get("dflash_config")
    own = {**config, **nested} if isinstance(nested, dict) else config
    layers = size(config, "num_hidden_layers", most=_MOST_LAYERS)
    heads = size(config, "num_attention_heads")
    width = size(config, "hidden_size")
    kinds = config.get("layer_types", [_FULL] * layers)
    if not isinstance(kinds, list) or len(kinds) != layers or not {_SLIDING, _FULL}.issuperset(map(str, kinds)):
        raise ModelError(f"config.json: invalid layer_types of {layers} layers: {kinds!r}")
    sliding = [kind == _SLIDING for kind in kinds]
    window = size(config, "sliding_window", most=_MOST_TOKENS) if any(sliding) else 0
    key_heads = size(config, "num_key_value_heads", heads)
    if heads % key_heads:
        raise ModelError(f"config.json: num_attention_heads ({heads}) must be divisible by {key_heads}")
    causal = own.get("causal", config.get("is_causal"))
    if causal is None and architecture == GLIMMER:
        causal = False
    head_width = size(config, "head_dim", width // heads)
    block = size(own, "block_size", most=_MOST_BLOCK)
    if block < 2:
        raise ModelError(f"config.json: invalid block_size: {block}")
    # The field of a Glimmer draft does not count the row itself, but `windows` does.
    seen = window + (architecture == GLIMMER)
    return DFlashConfig(
        width=width,
        inner_width=size(config, "intermediate_size"),
        heads=heads,
        key_heads=key_heads,
        head_width=head_width,
        eps=positive(config, "rms_norm_eps", 1e-6),
        rope=_rope(config, head_width, str(kinds[0])),
        windows=tuple(seen if slides else 0 for slides in sliding),
        causal=tuple(slides if causal is None else bool(causal) for slides in sliding),
        context_norm=architecture == LAGUNA,
        block=block,
        mask_token=required_token(own, "mask_token_id"),
        taps=_taps(own.get("target_layer_ids")),
        target_layers=first_size(0, (own, "num_target_layers")),
        vocab_size=first_size(0, (config, "vocab_size")),
    )


def _taps(found: object) -> tuple[int, ...]:
    if not isinstance(found, list) or not found or not all(type(layer) is int and layer >= 0 for layer in found):
        raise ModelError(f"config.json: invalid target_layer_ids: {found!r}")
    if len(found) > _MOST_LAYERS or any(later <= layer for layer, later in pairwise(found)):
        raise ModelError(f"config.json: target_layer_ids must ascend: {found!r}")
    return tuple(found)


def _rope(config: Config, head_width: int, kind: str) -> Rope:
    parameters, scaling = section(config, "rope_parameters"), section(config, "rope_scaling")
    rope: Config = {**(section(parameters, kind) or parameters), **scaling}
    base = positive(config if config.get("rope_theta") else rope, "rope_theta", 1_000_000.0)
    share = positive(rope, "partial_rotary_factor", 1.0)
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    return Rope(
        width=int(head_width * share),
        base=base,
        scaling=rope if scaled else None,
        most_tokens=size(config, "max_position_embeddings", 1 << 20, _MOST_TOKENS),
        interleaved=config.get("rope_interleaved") is True,
    )


_FAMILY = Family("dflash")
_NOT_OURS = ("quantization", "quantization_config", "quantize_activations")
"""The fields of `config.json` that do not describe the draft's tensors as they are stored here."""
_RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


def open_dflash(checkpoint: ModelCheckpoint) -> OpenedModel:
    """Interprets the headers of a DFlash draft. Raises ModelError if they are invalid."""
    config = read_config(checkpoint)
    architecture = architecture_of(config, from_store=checkpoint.from_store)
    tensors: dict[str, LogicalTensor] = {}
    for tensor in checkpoint.tensors.values():
        check_companions(tensor)
        name = tensor.name.removeprefix("model.")
        for old, new in _RENAMED.items():
            name = name.replace(old, new, 1) if name.startswith(old) else name
        if name in tensors:
            raise ModelError(f"two of its tensors are the same parameter: {name}")
        tensors[name] = tensor._replace(name=name)
    config = {key: value for key, value in config.items() if key not in _NOT_OURS}
    return OpenedModel(
        name=checkpoint.name,
        architecture=architecture,
        family=_FAMILY,
        config=config,
        module_config=config,
        tensors=tensors,
        context_length=0,
        vocab_size=read_dflash_config(config, architecture).vocab_size,
        checkpoint=checkpoint,
    )
