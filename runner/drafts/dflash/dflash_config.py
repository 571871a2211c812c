"""Reads the headers of a DFlash draft: `config.json`, and the names of the tensors."""

import re
from itertools import pairwise
from typing import NamedTuple

from runner.errors import ModelError
from runner.model.architectures import Config, Family, architecture_of
from runner.model.fields import expect, first_size, flag, positive, required_token, section, size
from runner.model.module_config import read_config
from runner.model.opened import OpenedModel
from runner.model.packing import check_companions
from runner.model.sources.checkpoint import LogicalTensor, ModelCheckpoint

LAGUNA, GLIMMER, DFLASH2 = "DFlashLagunaForCausalLM", "MuseGlimmerAssistantModel", "DFlash2DraftModel"
DSPARK = frozenset({"DSparkDraftModel", "Lfm2DSparkDraftModel", "Qwen3DSparkModel"})
ARCHITECTURES = frozenset({"DFlashDraftModel", LAGUNA, GLIMMER, DFLASH2}) | DSPARK
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
    most_drafts: int
    """The most drafts of a block."""
    anchored: bool
    """True if the first draft is made of the row of the last token, and a block thus has one row fewer."""
    mask_token: int
    taps: tuple[int, ...]
    """The layers of the target, by number, whose outputs become the context."""
    target_layers: int
    """The number of layers of the target; 0 if unknown."""
    vocab_size: int
    """The number of tokens in the target's vocabulary; 0 if unknown."""
    markov_rank: int = 0
    """The rank of the matrix by which DSpark adds to the logits after each token; 0 without such a matrix."""
    selector_rank: int = 0
    candidates: int = 0
    """The number of tokens from which the selector of DFlash 2 chooses each draft; 0 without a selector."""
    convolved: int = 0
    """The number of rows in each sum of the convolutions of DFlash 2; 0 without convolutions."""
    group: int = 0
    """The number of neighbouring numbers of a row that share a factor of a convolution."""
    embedding_scale: float = 1.0
    logit_scale: tuple[float, float] | None = None
    """A factor for logits, and a limit, 0 for none. They replace the target's own."""


def read_dflash_config(config: Config, architecture: str) -> DFlashConfig:
    """Reads the fields of `config`, the draft's `config.json`. Raises ModelError for missing and invalid fields."""
    if "transformer_layer_config" in config:
        raise ModelError("config.json: drafts in the form of vLLM's speculators are not supported; use the original")
    expect(config, "hidden_act", "silu")
    own = {**config, **section(config, "dflash_config")}
    layers = size(config, "num_hidden_layers", most=_MOST_LAYERS)
    heads = size(config, "num_attention_heads")
    width = size(config, "hidden_size")
    kinds = [_SLIDING] * layers if own.get("use_swa") is True else config.get("layer_types", [_FULL] * layers)
    if not isinstance(kinds, list) or len(kinds) != layers or not {_SLIDING, _FULL}.issuperset(map(str, kinds)):
        raise ModelError(f"config.json: invalid layer_types of {layers} layers: {kinds!r}")
    sliding = [kind == _SLIDING for kind in kinds]
    field = "swa_window_size" if own.get("swa_window_size") else "sliding_window"
    window = size(own, field, most=_MOST_TOKENS) if any(sliding) else 0
    key_heads = size(config, "num_key_value_heads", heads)
    if heads % key_heads:
        raise ModelError(f"config.json: num_attention_heads ({heads}) must be divisible by {key_heads}")
    causal = own.get("causal", config.get("is_causal"))
    # In a block of DFlash 2, and of DSpark, each row sees all others even through a window.
    if causal is None and architecture in (GLIMMER, DFLASH2, *DSPARK):
        causal = False
    head_width = size(config, "head_dim", width // heads)
    # The field of a Glimmer draft does not count the row itself, but `windows` does.
    seen = window + (architecture == GLIMMER)
    most_drafts, anchored = _block(own, architecture)
    result = DFlashConfig(
        width=width,
        inner_width=size(config, "intermediate_size"),
        heads=heads,
        key_heads=key_heads,
        head_width=head_width,
        eps=positive(config, "rms_norm_eps", 1e-6),
        rope=_rope(config, architecture, head_width, str(kinds[0])),
        windows=tuple(seen if slides else 0 for slides in sliding),
        causal=tuple(slides if causal is None else bool(causal) for slides in sliding),
        context_norm=architecture == LAGUNA,
        most_drafts=most_drafts,
        anchored=anchored,
        mask_token=required_token(own, "mask_token_id"),
        taps=_taps(own.get("target_layer_ids")),
        target_layers=first_size(0, (own, "num_target_layers")),
        vocab_size=first_size(0, (config, "vocab_size")),
    )
    if architecture == DFLASH2:
        return _with_dflash2(result, own)
    return _with_dspark(result, own) if architecture in DSPARK else result


def _block(own: Config, architecture: str) -> tuple[int, bool]:
    """Returns the most drafts of a block, and True if the row of the last token makes the first of them."""
    block = size(own, "block_size", most=_MOST_BLOCK)
    # The size of a block counts the last token, except in most drafts of DSpark.
    uncounted = architecture in DSPARK and not flag(own, "dspark_bonus_anchor")
    if block < 2:
        raise ModelError(f"config.json: invalid block_size: {block}")
    return block if uncounted else block - 1, uncounted and own.get("sample_from_anchor") is not False


def _with_dflash2(config: DFlashConfig, own: Config) -> DFlashConfig:
    group = size(own, "conv_group_size")
    if config.width % group:
        raise ModelError(f"config.json: hidden_size ({config.width}) must be divisible by {group}")
    most = positive(own, "final_logit_softcapping") if own.get("final_logit_softcapping") else 0.0
    return config._replace(
        selector_rank=size(own, "selector_rank"),
        candidates=size(own, "selector_top_k", most=size(own, "vocab_size")),
        convolved=size(own, "conv_kernel_size", most=_MOST_BLOCK),
        group=group,
        embedding_scale=positive(own, "input_embedding_scale", 1.0),
        logit_scale=(positive(own, "output_multiplier", 1.0), most),
    )


def _with_dspark(config: DFlashConfig, own: Config) -> DFlashConfig:
    expect(own, "markov_head_type", "vanilla")
    vocab_size = size(own, "vocab_size")
    if (drafted := size(own, "draft_vocab_size", vocab_size)) != vocab_size:
        raise ModelError(f"it drafts only {drafted} of {vocab_size} tokens, which is not supported")
    return config._replace(markov_rank=first_size(0, (own, "markov_rank")))


def _taps(found: object) -> tuple[int, ...]:
    if not isinstance(found, list) or not found or not all(type(layer) is int and layer >= 0 for layer in found):
        raise ModelError(f"config.json: invalid target_layer_ids: {found!r}")
    if len(found) > _MOST_LAYERS or any(later <= layer for layer, later in pairwise(found)):
        raise ModelError(f"config.json: target_layer_ids must ascend: {found!r}")
    return tuple(found)


def _rope(config: Config, architecture: str, head_width: int, kind: str) -> Rope:
    parameters, scaling = section(config, "rope_parameters"), section(config, "rope_scaling")
    rope: Config = {**(section(parameters, kind) or parameters), **scaling}
    base = positive(config if config.get("rope_theta") else rope, "rope_theta", 1_000_000.0)
    # Drafts of DSpark have the share of their target in config.json, but rotate all numbers.
    share = 1.0 if architecture in DSPARK else positive(rope, "partial_rotary_factor", 1.0)
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    return Rope(
        width=int(head_width * share),
        base=base,
        scaling=rope if scaled else None,
        most_tokens=size(config, "max_position_embeddings", 1 << 20, _MOST_TOKENS),
        interleaved=config.get("rope_interleaved") is True or config.get("rope_is_neox_style") is False,
    )


_FAMILY = Family("dflash")
_NOT_OURS = ("quantization", "quantization_config", "quantize_activations")
"""The fields of `config.json` that do not describe the draft's tensors as they are stored here."""
_RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
_CODEBOOK = re.compile(r"candidate_selector\.\w+_codebook")
_UNUSED = ("confidence_head.", "embed_tokens.", "lm_head.")
"""Tensors of DSpark that are left out: the tables are the target's own."""


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
        if architecture in DSPARK and name.startswith(_UNUSED):
            continue
        if _CODEBOOK.fullmatch(name):
            name += ".weight"
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
