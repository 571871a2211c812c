"""`config.json` of a DFlash draft, checked."""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from runner.errors import ModelError
from runner.model.config import read_config
from runner.model.families import Config, Family, architecture_of
from runner.model.opened import OpenedModel
from runner.model.packing import check_companions
from runner.model.sources.checkpoint import Checkpoint, Tensor

LAGUNA, GLIMMER = "DFlashLagunaForCausalLM", "MuseGlimmerAssistantModel"
ARCHITECTURES = frozenset({"DFlashDraftModel", LAGUNA, GLIMMER})
_SLIDING, _FULL = "sliding_attention", "full_attention"
_MOST_LAYERS = 64
_MOST_BLOCK = 256


class Rope(NamedTuple):
    """The rotary embedding of positions."""

    width: int
    base: float
    scaling: Config | None
    """As mlx-lm reads it; None without scaling."""
    most_tokens: int
    interleaved: bool
    """True if neighbours make pairs, False if the halves of a row do."""


class DFlashConfig(NamedTuple):
    """What a draft computes, and for which target."""

    width: int
    """Of hidden states, the target's and its own."""
    inner_width: int
    heads: int
    key_heads: int
    head_width: int
    eps: float
    rope: Rope
    windows: tuple[int, ...]
    """For each layer how many tokens a row sees back, itself included; 0: all."""
    causal: tuple[bool, ...]
    """For each layer whether a row sees only those of the block that stand before it."""
    context_norm: bool
    """True if each layer normalizes the context as it does its own input."""
    block: int
    """The most rows of a block: a token and its drafts."""
    mask_token: int
    taps: tuple[int, ...]
    """The layers of the target whose outputs are the context."""
    target_layers: int
    """The number of layers of the target; 0 if unknown."""
    vocab_size: int
    """Of the target; 0 if unknown."""


def read_dflash_config(config: Config, architecture: str) -> DFlashConfig:
    """Returns what `config` says. Raises ModelError for what is missing or makes no sense."""
    nested = config.get("dflash_config")
    own = {**config, **nested} if isinstance(nested, dict) else config
    layers = _number(config, "num_hidden_layers", most=_MOST_LAYERS)
    heads = _number(config, "num_attention_heads")
    width = _number(config, "hidden_size")
    kinds = config.get("layer_types", [_FULL] * layers)
    if not isinstance(kinds, list) or len(kinds) != layers or not {_SLIDING, _FULL}.issuperset(map(str, kinds)):
        raise ModelError(f"config.json: invalid layer_types of {layers} layers: {kinds!r}")
    sliding = [kind == _SLIDING for kind in kinds]
    window = _number(config, "sliding_window") if any(sliding) else 0
    key_heads = _number(config, "num_key_value_heads", default=heads)
    if heads % key_heads:
        raise ModelError(f"config.json: num_attention_heads ({heads}) must be divisible by {key_heads}")
    causal = own.get("causal", config.get("is_causal"))
    if causal is None and architecture == GLIMMER:
        causal = False
    head_width = _number(config, "head_dim", default=width // heads)
    # The window of a Glimmer's draft does not count the row itself.
    seen = window + (architecture == GLIMMER)
    return DFlashConfig(
        width=width,
        inner_width=_number(config, "intermediate_size"),
        heads=heads,
        key_heads=key_heads,
        head_width=head_width,
        eps=_real(config, "rms_norm_eps", 1e-6),
        rope=_rope(config, head_width, str(kinds[0])),
        windows=tuple(seen if slides else 0 for slides in sliding),
        causal=tuple(slides if causal is None else bool(causal) for slides in sliding),
        context_norm=architecture == LAGUNA,
        block=_number(own, "block_size", least=2, most=_MOST_BLOCK),
        mask_token=_number(own, "mask_token_id", least=0),
        taps=_taps(own.get("target_layer_ids")),
        target_layers=_number(own, "num_target_layers", least=0, default=0),
        vocab_size=_number(config, "vocab_size", least=0, default=0),
    )


def _taps(found: object) -> tuple[int, ...]:
    if not isinstance(found, list) or not found or not all(type(layer) is int and layer >= 0 for layer in found):
        raise ModelError(f"config.json: invalid target_layer_ids: {found!r}")
    if len(found) > _MOST_LAYERS or any(later <= layer for layer, later in pairwise(found)):
        raise ModelError(f"config.json: target_layer_ids must ascend: {found!r}")
    return tuple(found)


def _rope(config: Config, head_width: int, kind: str) -> Rope:
    found = config.get("rope_parameters")
    parameters = found if isinstance(found, dict) else {}
    by_kind = parameters.get(kind)
    scaling = config.get("rope_scaling")
    rope: Config = {**(by_kind if isinstance(by_kind, dict) else parameters)}
    rope |= scaling if isinstance(scaling, dict) else {}
    base = _real(config, "rope_theta", 0.0) or _real(rope, "rope_theta", 1_000_000.0)
    share = _real(rope, "partial_rotary_factor", 1.0)
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    return Rope(
        width=int(head_width * share),
        base=base,
        scaling=rope if scaled else None,
        most_tokens=_number(config, "max_position_embeddings", default=1 << 20),
        interleaved=config.get("rope_interleaved") is True,
    )


def _number(config: Mapping[str, object], key: str, least: int = 1, most: int = 1 << 31, default: int = -1) -> int:
    """Returns an integer of these bounds; `default` if it is missing, unless that is negative."""
    value = config.get(key)
    if value is None and default >= 0:
        return default
    if value is None:
        raise ModelError(f"config.json lacks {key}")
    if type(value) is not int or not least <= value <= most:
        raise ModelError(f"config.json: invalid {key}: {value!r}")
    return value


def _real(config: Mapping[str, object], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
        raise ModelError(f"config.json: invalid {key}: {value!r}")
    return float(value)


# --- Opens a DFlash draft by its headers.

_FAMILY = Family("dflash")
_NOT_OURS = ("quantization", "quantization_config", "quantize_activations")
"""Fields of `config.json` about how others store the tensors."""
_RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


def open_dflash(checkpoint: Checkpoint) -> OpenedModel:
    """Interprets the checkpoint of a DFlash draft. Raises ModelError."""
    config = read_config(checkpoint)
    architecture = architecture_of(config, from_store=checkpoint.from_store)
    tensors: dict[str, Tensor] = {}
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
