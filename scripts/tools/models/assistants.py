"""Tiny assistants of Gemma 4 as they are published: configs and random tensors, from numpy alone, so that a recording
in another environment has the same ones."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from scripts.tools.models import data

Config = dict[str, object]
Weights = dict[str, NDArray[np.float32] | NDArray[np.int64]]

VOCABULARY_SIZE = 274
"""Tokens, as many as `checkpoints.TOKENIZER` has."""
WIDTH = 128
"""Of an assistant, which has another one than its target."""
BACKBONE = 64
"""The width of the targets in `sources_gemma`."""
_FULL = "full_attention"
_TEXT: Config = data.read("drafts", VOCABULARY_SIZE=VOCABULARY_SIZE)["assistant_text"]
_GROUPS: Config = {"use_ordered_embeddings": True, "num_centroids": 137, "centroid_intermediate_top_k": 20}
KINDS: Mapping[str, Config] = {
    "every token": {},
    "groups": _GROUPS,
    "a table for scores": {"tie_word_embeddings": False},
    "groups of another table": {**_GROUPS, "tie_word_embeddings": False},
}
"""Changes of the config, at its top."""


def config_of(kind: str = "every token", **text: object) -> Config:
    """The `config.json` of an assistant; `text` are changes of its text model."""
    changes = KINDS[kind]
    tied = {"tie_word_embeddings": changes.get("tie_word_embeddings", True)}
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": BACKBONE,
        "use_ordered_embeddings": False,
        **changes,
        "text_config": {**_TEXT, **tied, **text},
    }


def shapes_of(config: Config) -> dict[str, tuple[int, ...]]:
    """The published tensors but for the order of tokens."""
    text = config["text_config"]
    assert isinstance(text, dict)
    width, inner, heads, vocabulary = (
        text[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (width, 2 * BACKBONE),
        "post_projection.weight": (BACKBONE, width),
        "model.embed_tokens.weight": (vocabulary, width),
        "model.norm.weight": (width,),
    }
    for layer, kind in enumerate(text["layer_types"]):
        of_head = text["global_head_dim"] if kind == _FULL else text["head_dim"]
        own = {
            "self_attn.q_proj.weight": (heads * of_head, width),
            "self_attn.o_proj.weight": (width, heads * of_head),
            "self_attn.q_norm.weight": (of_head,),
            "mlp.gate_proj.weight": (inner, width),
            "mlp.up_proj.weight": (inner, width),
            "mlp.down_proj.weight": (width, inner),
            "layer_scalar": (1,),
        }
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        own |= {f"{norm}_layernorm.weight": (width,) for norm in norms}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    if not text["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocabulary, width)
    if config["use_ordered_embeddings"]:
        groups = config["num_centroids"]
        assert isinstance(groups, int)
        shapes["masked_embedding.centroids.weight"] = (groups, width)
    return shapes


def weights_of(config: Config, seed: int = 0) -> Weights:
    """Random tensors: matrices that keep the scale of their inputs, vectors around one."""
    numbers = np.random.default_rng(seed)
    weights: Weights = {}
    for name, shape in shapes_of(config).items():
        noise = numbers.standard_normal(shape)
        weights[name] = (noise / shape[1] ** 0.5 if len(shape) > 1 else 1 + noise / 10).astype(np.float32)
    if config["use_ordered_embeddings"]:
        weights["masked_embedding.token_ordering"] = numbers.permutation(VOCABULARY_SIZE)
    return weights
