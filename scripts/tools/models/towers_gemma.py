"""Tiny models of Gemma 4 and Glimmer that see, as Hugging Face publishes them: text models with a whole tower.

Glimmer's tokens around a picture are the tokenizer's, `<|image_start|>` and `<|image_end|>`, not of its config.
"""

from collections.abc import Mapping
from typing import cast

from scripts.tools.models import data
from scripts.tools.models.sources_form import SOURCES, Config, Shape, Source

_TOWERS = data.read("towers")
TEXT_WIDTH = 64
GEMMA4_VISION: Config = _TOWERS["gemma4_vision"]
UNIFIED_VISION: Config = _TOWERS["unified_vision"]
GLIMMER_VISION: Config = _TOWERS["glimmer_vision"]
GLIMMER_AROUND: Config = _TOWERS["glimmer_around"]
"""The fields of a Glimmer about its tower that are not in `vision_config`."""
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
_GEMMA_TOKENS: Config = {"boi_token_id": 60, "eoi_token_id": 61, "image_token_id": 62}


def gemma4_tensors(changes: Config, root: str = "model.") -> dict[str, Shape]:
    """The tensors of a Gemma 4 tower; `changes` are of `GEMMA4_VISION`."""
    vision = {**GEMMA4_VISION, **changes}
    config = cast("Mapping[str, int]", vision)
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, Shape] = {
        "vision_tower.patch_embedder.input_proj.weight": (width, 3 * config["patch_size"] ** 2),
        "vision_tower.patch_embedder.position_embedding_table": (2, config["position_embedding_size"], width),
        "embed_vision.embedding_projection.weight": (TEXT_WIDTH, width),
    }
    if vision.get("standardize"):
        shapes |= {"vision_tower.std_bias": (width,), "vision_tower.std_scale": (width,)}
    linears = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    for index in range(config["num_hidden_layers"]):
        layer = f"vision_tower.encoder.layers.{index}."
        shapes |= {f"{layer}{name}.linear.weight": shape for name, shape in linears.items()}
        shapes |= {f"{layer}{name}_layernorm.weight": (width,) for name in norms}
        shapes |= {f"{layer}self_attn.{name}_norm.weight": (head,) for name in "qk"}
        if vision.get("use_clipped_linears"):
            shapes |= {f"{layer}{name}.{bound}": () for name in linears for bound in _BOUNDS}
    return {f"{root}{name}": shape for name, shape in shapes.items()}


def unified_tensors(changes: Config, root: str = "model.") -> dict[str, Shape]:
    """The tensors of a Gemma 4 without an encoder; `changes` are of `UNIFIED_VISION`."""
    config = cast("Mapping[str, int]", {**UNIFIED_VISION, **changes})
    width, values = config["mm_embed_dim"], 3 * config["model_patch_size"] ** 2
    shapes: dict[str, Shape] = {
        **_norm("vision_embedder.patch_ln1", values),
        "vision_embedder.patch_dense.weight": (width, values),
        "vision_embedder.patch_dense.bias": (width,),
        **_norm("vision_embedder.patch_ln2", width),
        "vision_embedder.pos_embedding": (config["mm_posemb_size"], 2, width),
        **_norm("vision_embedder.pos_norm", width),
        "embed_vision.embedding_projection.weight": (TEXT_WIDTH, width),
    }
    return {f"{root}{name}": shape for name, shape in shapes.items()}


def glimmer_tensors(changes: Config, root: str = "model.") -> dict[str, Shape]:
    """The tensors of a Glimmer tower in the names of transformers; `changes` are of `GLIMMER_VISION`."""
    config = cast("Mapping[str, int]", {**GLIMMER_VISION, **changes})
    around = cast("Mapping[str, int]", GLIMMER_AROUND)
    width, inner, adapter = config["hidden_size"], config["intermediate_size"], around["projector_hidden_size"]
    values, cells = config["patch_temporal"] * 3 * config["patch_size"] ** 2, config["pos_emb_height"]
    shapes: dict[str, Shape] = {
        "vision_tower.patch_embedder.patch_embedding.weight": (width, values),
        "vision_tower.patch_embedder.position_embedding_table.weight": (cells * config["pos_emb_width"], width),
        **_norm("vision_tower.ln_pre", width),
        **_norm("vision_tower.ln_post", width),
        "vision_adapter.fc1.weight": (adapter, around["out_hidden_size"]),
        "vision_adapter.fc2.weight": (adapter, adapter),
        "vision_projection.weight": (TEXT_WIDTH, adapter),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"vision_tower.layers.{index}."
        shapes |= {**_norm(f"{layer}norm1", width), **_norm(f"{layer}norm2", width)}
        for name, shape in (
            *((f"attn.{name}", (width, width)) for name in ("q_proj", "k_proj", "v_proj", "proj")),
            *(("mlp.fc1", (inner, width)), ("mlp.fc2", (width, inner))),
        ):
            shapes |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
    return {f"{root}{name}": shape for name, shape in shapes.items()}


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _seeing(source: Source, tensors: dict[str, Shape], vision: Config, text: Config, **around: object) -> Source:
    """`source` with a whole tower instead of parts of one; `text` is added to its `text_config`."""
    inner = {**cast("Config", source.config["text_config"]), **text}
    spare = {name: shape for name, shape in source.spare.items() if "vision" not in name}
    config = {**source.config, "text_config": inner, "vision_config": vision, **around}
    return source._replace(config=config, spare={**spare, **tensors})


_CLAMPED: Config = {"use_clipped_linears": True}
_STANDARD: Config = {"standardize": True}
_BOTH_WAYS: Config = {"use_bidirectional_attention": "vision"}
SEEING: dict[str, Source] = {
    # e2b and e4b: inputs for each layer, clamps, causal.
    "gemma4-seeing": _seeing(
        SOURCES["gemma4"], gemma4_tensors(_CLAMPED), {**GEMMA4_VISION, **_CLAMPED}, {}, **_GEMMA_TOKENS
    ),
    # 26B-A4B: experts, a picture's tokens see each other in sliding layers.
    "gemma4-moe-seeing": _seeing(
        SOURCES["gemma4-moe"], gemma4_tensors(_STANDARD), {**GEMMA4_VISION, **_STANDARD}, _BOTH_WAYS, **_GEMMA_TOKENS
    ),
    "gemma4-unified-seeing": _seeing(
        SOURCES["gemma4-unified"], unified_tensors({}), UNIFIED_VISION, _BOTH_WAYS, **_GEMMA_TOKENS
    ),
    "glimmer-seeing": _seeing(
        SOURCES["muse-glimmer"], glimmer_tensors({}), GLIMMER_VISION, {}, image_token_id=62, **GLIMMER_AROUND
    )._replace(tokens={"<|image_start|>": 5, "<|image_end|>": 6}),
}
"""Sources with a whole tower, by a short name of ours."""
