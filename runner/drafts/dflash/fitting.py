"""Checks that a DFlash draft fits its target, and loads it."""

import re
from collections.abc import Mapping
from functools import partial

import mlx.core as mx

from runner.drafts.dflash.dflash_config import DFlashConfig, read_dflash_config
from runner.drafts.dflash.drafter import BlockContext, BlockDraft, BlockDrafter, DFlashModule, OptionalTensors
from runner.drafts.hidden_states import text_rows
from runner.drafts.target import Tap, Target, target_of
from runner.errors import ModelError
from runner.model.opened import OpenedModel
from runner.model.weights.experts import Weights
from runner.model.weights.loading import LoadedModel, assemble_part, load_part
from runner.model.weights.packed import Arrays

_FUSED = re.compile(r"(layers\.\d+\.self_attn\.)qkv_proj\.(weight|bias)")
_TRIED_TOKENS = 2


def block_target(config: DFlashConfig, loaded: LoadedModel) -> Target:
    """Returns the parts of the target `loaded` that the draft uses. The target may be made of placeholders. Raises
    ModelError if the draft was made for another model, or if the target lacks a part."""
    try:
        target = target_of(loaded, config.logit_scale)
        rows = target.embed(mx.zeros((1, 1), mx.uint32))
        width, vocab_size = rows.shape[-1], target.unembed(rows).shape[-1]
    except Exception as error:  # a model of another structure may raise any exception
        raise ModelError(f"the model lacks a part that the draft shares ({type(error).__name__}: {error})") from error
    for what, wanted, found in (
        ("layers", config.target_layers, len(target.layers)),
        ("numbers a token", config.width, width),
        ("tokens in the vocabulary", config.vocab_size, vocab_size),
    ):
        if wanted and wanted != found:
            raise ModelError(f"it was made for a model of {wanted} {what}, and this one has {found}")
    if config.taps[-1] >= len(target.layers):
        raise ModelError(f"it reads layer {config.taps[-1]}, but the model has {len(target.layers)} layers")
    if config.mask_token >= vocab_size:
        raise ModelError(f"its mask token is {config.mask_token}, but the model has {vocab_size} tokens")
    return target


def check_dflash(opened: OpenedModel, loaded: LoadedModel) -> None:
    """Raises ModelError unless the draft fits the target `loaded`, which may be made of placeholders."""
    block_target(read_dflash_config(opened.config, opened.architecture), loaded)


def load_dflash(
    opened: OpenedModel, loaded: LoadedModel, dtype: str = "keep", budget_bytes: int | None = None
) -> BlockDrafter:
    """Loads a draft for the target `loaded`. Raises ModelError if the draft cannot be used, and the errors of the first
    forward. `dtype` is as for `weights.loading.load`; `budget_bytes` is the part of the budget that is left."""
    config = read_dflash_config(opened.config, opened.architecture)
    target = block_target(config, loaded)
    module = load_part(opened, partial(assemble_dflash, opened), "the draft", dtype, budget_bytes)
    draft = BlockDraft(config, module, target)
    _try(draft, loaded)
    return BlockDrafter(opened.name, draft)


def _try(draft: BlockDraft, loaded: LoadedModel) -> None:
    """Drafts once, since MLX refuses some layers only when they compute. Raises ModelError if the target's layers have
    other outputs than the draft reads. Builds a forward of the target for their shapes, but does not compute it."""
    layers = loaded.make_layers()
    if not text_rows(layers):
        raise ModelError("no layer of the model counts the tokens that it has seen")
    tap, tokens = Tap(draft.tapped, _TRIED_TOKENS), mx.zeros((1, _TRIED_TOKENS), mx.uint32)
    _, features = tap.observe(partial(loaded.logits, tokens, layers))
    wanted = (1, _TRIED_TOKENS, len(draft.config.taps) * draft.config.width)
    if features is None or features.shape != wanted:
        found = "nothing" if features is None else f"{list(features.shape)}"
        raise ModelError(f"it draws on layers that return {list(wanted)}, and those of the model return {found}")
    context = BlockContext(draft.make_layers(1), [0])
    draft.module.remember(mx.zeros(wanted, features.dtype), context)
    mx.eval(draft.draft([0], min(2, draft.config.most_drafts), context, partial(mx.argmax, axis=-1)))


def assemble_dflash(opened: OpenedModel, arrays: Mapping[str, Arrays]) -> DFlashModule:
    """Builds the draft's module with `arrays`, which stay lazy. Raises ModelError if a tensor does not fit."""
    config = read_dflash_config(opened.config, opened.architecture)
    names = opened.tensors.keys()
    if len(config.windows) > len(names):
        raise ModelError(f"most of its {len(config.windows)} layers are missing")
    parts = OptionalTensors(
        gates=any(name.endswith("self_attn.g_proj.weight") for name in names),
        tap_norms=any(name.startswith("aux_hidden_norms.") for name in names),
        biases=any(name.endswith(("q_proj.bias", "qkv_proj.bias")) for name in names),
        sinks=any(name.endswith("self_attn.attention_sink_bias") for name in names),
    )
    rows = config.heads * config.head_width, config.key_heads * config.head_width

    def sanitize(weights: Weights) -> tuple[DFlashModule, Weights]:
        return DFlashModule(config, parts), _with_split(weights, *rows)

    return assemble_part(opened, sanitize, arrays)


def _with_split(weights: Weights, queries: int, keys: int) -> Weights:
    """Splits each fused tensor into one tensor for `queries` rows, and two for `keys` rows: of keys and of values."""
    result: Weights = {}
    for name, array in weights.items():
        match = _FUSED.fullmatch(name)
        if match is None:
            result[name] = array
            continue
        places = {"q": (0, queries), "k": (queries, queries + keys), "v": (queries + keys, array.shape[0])}
        for part, (start, stop) in places.items():
            result[f"{match[1]}{part}_proj.{match[2]}"] = array[start:stop]
    return result
