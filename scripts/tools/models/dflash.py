"""Makes tiny DFlash drafts with random weights, named as their publishers name them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from scripts.tools.models import data
from scripts.tools.models.checkpoints import VOCABULARY_SIZE, write_weights
from scripts.tools.models.sources_form import Config

DRAFT, LAGUNA, GLIMMER = "DFlashDraftModel", "DFlashLagunaForCausalLM", "MuseGlimmerAssistantModel"
DFLASH2, DSPARK = "DFlash2DraftModel", "DSparkDraftModel"
ARCHITECTURES = (DRAFT, LAGUNA, GLIMMER, DFLASH2, DSPARK)
BLOCK = 6
_NESTED = ("causal", "num_target_layers", "attention_sink_bias", "sample_from_anchor")


def dflash_config(architecture: str, changes: Mapping[str, object] | None = None) -> Config:
    """Returns the config of a draft for the tiny models of this folder, which are 64 wide. `changes` of None delete a
    key; those of `dflash_config` are made within it."""
    nested: Config = {"mask_token_id": 5, "target_layer_ids": [0, 1], "block_size": BLOCK}
    table = data.read("drafts", VOCABULARY_SIZE=VOCABULARY_SIZE)["dflash"]
    config: Config = {"architectures": [architecture], **table, "dflash_config": nested}
    if architecture == LAGUNA:
        sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 32}
        config |= {"model_type": "laguna", "gating": "per-head", "draft_vocab_size": VOCABULARY_SIZE, **sliding}
        nested |= {"causal": True}
    if architecture == DFLASH2:
        nested |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 12}
    if architecture == DSPARK:
        nested |= {"markov_rank": 8}
    if architecture == GLIMMER:
        sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}
        rope = {"rope_theta": 10000.0, "rope_type": "default"}
        config |= {"model_type": "muse_glimmer_assistant", "rope_parameters": rope, **sliding, **nested}
        for key in ("dflash_config", "vocab_size", "rope_theta"):
            del config[key]
    for key, value in (changes or {}).items():
        inner = key in nested or key in _NESTED
        place = nested if inner and architecture != GLIMMER else config
        place[key] = value
        if value is None:
            del place[key]
    return config


def dflash_weights(config: Config, seed: int = 0) -> dict[str, mx.array]:
    mx.random.seed(seed)
    weights = {name: _weight(shape) for name, shape in _shapes(config).items()}
    for name, array in weights.items():
        if "_conv." in name:  # published convolutions change little
            own = (mx.arange(array.shape[1]) == 0)[:, None] if array.ndim == 3 else 0
            weights[name] = array / 5 + own
    return weights


def write_dflash(directory: Path, architecture: str, changes: Mapping[str, object] | None = None) -> Path:
    """Writes config and weights into `directory` (made if absent) and returns it."""
    config = dflash_config(architecture, changes)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    write_weights(directory, dflash_weights(config))
    return directory


def _weight(shape: tuple[int, ...]) -> mx.array:
    if len(shape) == 1:
        return 1 + 0.2 * mx.random.normal(shape)
    return mx.random.normal(shape) / math.sqrt(shape[1])


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    architectures = config["architectures"]
    assert isinstance(architectures, list)
    (architecture,) = architectures
    own = config.get("dflash_config", config)
    assert isinstance(own, dict)
    width, inner = _int(config, "hidden_size"), _int(config, "intermediate_size")
    head = _int(config, "head_dim")
    queries, keys = _int(config, "num_attention_heads") * head, _int(config, "num_key_value_heads") * head
    taps = own["target_layer_ids"]
    assert isinstance(taps, list)
    fc, norm = ("encoder.fc", "encoder.output_norm_enc") if architecture == GLIMMER else ("fc", "hidden_norm")
    shapes: dict[str, tuple[int, ...]] = {
        f"{fc}.weight": (width, len(taps) * width),
        f"{norm}.weight": (width,),
        "norm.weight": (width,),
    }
    projections = {"q": queries, "k": keys, "v": keys}
    if architecture == LAGUNA:
        shapes |= {f"aux_hidden_norms.{place}.weight": (width,) for place in range(len(taps))}
        projections = {"qkv": queries + 2 * keys, "g": _int(config, "num_attention_heads")}
    kernel = 2 * _int(own, "conv_kernel_size") if architecture == DFLASH2 else 0
    if architecture == DFLASH2:
        table = (_int(config, "vocab_size"), _int(own, "selector_rank"))
        shapes |= {f"candidate_selector.{part}_codebook": table for part in ("predecessor", "successor")}
        shapes["candidate_selector.hidden_projection.weight"] = (table[1], width)
    if architecture == DSPARK:
        table = (_int(config, "vocab_size"), _int(own, "markov_rank"))
        shapes |= {f"markov_head.markov_w{part}.weight": table for part in (1, 2)}
    for layer in range(_int(config, "num_hidden_layers")):
        attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        for part in ("attention", "mlp") if kernel else ():
            shapes[f"layers.{layer}.{part}_conv.base_kernel"] = (2, kernel // 2, width)
            groups = width // _int(own, "conv_group_size")
            shapes[f"layers.{layer}.{part}_conv.kernel_projection.weight"] = (kernel * groups, width)
        if own.get("attention_sink_bias"):
            shapes[f"{attention}.attention_sink_bias"] = (_int(config, "num_attention_heads"),)
        shapes |= {f"{attention}.{part}_proj.weight": (rows, width) for part, rows in projections.items()}
        shapes |= {f"{attention}.{part}_norm.weight": (head,) for part in "qk"}
        shapes |= {f"{mlp}.{part}_proj.weight": (inner, width) for part in ("gate", "up")}
        shapes |= {f"{attention}.o_proj.weight": (width, queries), f"{mlp}.down_proj.weight": (width, inner)}
        shapes |= {f"layers.{layer}.{part}_layernorm.weight": (width,) for part in ("input", "post_attention")}
    return shapes


def _int(config: Config, key: str) -> int:
    value = config[key]
    assert isinstance(value, int)
    return value
