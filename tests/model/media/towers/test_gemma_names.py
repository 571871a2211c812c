"""The towers of Gemma 4 and Glimmer under all names of tensors and from all forms of `config.json`."""

import re
from typing import cast

import pytest

from runner.errors import ModelError
from runner.media.towers.gemma4 import Gemma4Tower, Gemma4UnifiedTower
from runner.media.towers.glimmer import GlimmerTower
from runner.media.towers.plan import TOWERS
from runner.media.towers.tower import Grid
from tests.model.media.towers.gemma_cases import (
    CASES,
    NAMES,
    WIDTH,
    Config,
    Weights,
    distance,
    features,
    make_patches,
    make_tower,
    parameters,
)


def vision(name: str, **changes: object) -> Config:
    """The config of a case with other fields for its tower."""
    config = CASES[name].config
    return {**config, "vision_config": {**cast("Config", config["vision_config"]), **changes}}


def _original(weights: Weights, heads: int) -> Weights:
    """Glimmer's weights in Meta's names, with the two of a rotary pair beside each other."""
    rules = (
        (r"^patch_embedder\.patch_embedding", "vision_encoder.conv1_linear"),
        (r"^patch_embedder\.position_embedding_table\.weight", "vision_encoder.positional_embedding_vlm"),
        (r"^(ln_\w+)", r"vision_encoder.\1"),
        (r"^layers\.(\d+)\.norm", r"vision_encoder.transformer.\1.ln_"),
        (r"^layers\.(\d+)\.attn\.proj", r"vision_encoder.transformer.\1.attn.o_proj"),
        (r"^layers\.(\d+)\.attn", r"vision_encoder.transformer.\1.attn"),
        (r"^layers\.(\d+)\.mlp\.fc1", r"vision_encoder.transformer.\1.mlp.c_fc"),
        (r"^layers\.(\d+)\.mlp\.fc2", r"vision_encoder.transformer.\1.mlp.c_proj"),
        (r"^vision_adapter\.fc1", "vision_adapter.c_fc"),
        (r"^vision_adapter\.fc2", "vision_adapter.c_proj"),
    )
    result: Weights = {}
    for name, array in weights.items():
        pair = next(((old, new) for old, new in rules if re.match(old, name)), ("^", ""))
        if ".q_proj." in name or ".k_proj." in name:
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        result["model." + re.sub(pair[0], pair[1], name)] = array
    return result


def test_metas_own_form_of_glimmer_computes_the_same() -> None:
    published = make_tower("glimmer")
    config: Config = {
        "hidden_size": WIDTH, "has_vision": True, "vision_latent_dim": 32, "vision_mlp_ratio": 1.5, "vision_heads": 2,
        "vision_patch_size": 3, "vision_patch_temporal": 2, "vision_downsample_factor": 2, "vision_layers": 4,
        "vision_pos_emb_grid_h": 4, "vision_pos_emb_grid_w": 4, "vision_sparse_attention_factor": 2,
        "vision_output_dim": 128, "vision_adapter_dim": 40,
    }  # fmt: skip
    tower = GlimmerTower(config)
    stored = _original(parameters(published), 2)
    named = {str(tower.parameter_name(name)): array for name, array in stored.items()}
    tower.load_weights(list(tower.sanitize(named).items()), strict=True)
    for grid in (Grid(6, 10), Grid(4, 4)):
        patches = make_patches("glimmer", grid)
        assert distance(features(tower, patches, grid), features(published, patches, grid)) <= 2e-6


OWN = {
    Gemma4Tower: ("vision_tower.", ("embedding_projection.", "embed_vision.embedding_projection.")),
    Gemma4UnifiedTower: ("vision_embedder.", ("embedding_projection.", "embed_vision.embedding_projection.")),
    GlimmerTower: ("vision_tower.", ("vision_", "vision_")),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_found_under_its_published_name(name: str) -> None:
    tower = make_tower(name)
    prefix, (own, published) = OWN[type(tower)]
    for parameter in parameters(tower):
        stored = published + parameter.removeprefix(own) if parameter.startswith(own) else prefix + parameter
        assert tower.parameter_name(f"model.{stored}") == tower.parameter_name(stored) == parameter


def test_the_config_says_which_tower_of_gemma_4_it_is() -> None:
    for name in NAMES[:5]:
        case = CASES[name]
        assert TOWERS["gemma4"].kind(case.config["vision_config"]) is case.tower
    assert TOWERS["gemma4"].kind(None) is Gemma4Tower  # a text model


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma4", {"hidden_size": "32"}, "hidden_size"),
        ("gemma4", {"num_hidden_layers": 1 << 19}, "num_hidden_layers: want at most 1024, found"),
        ("gemma4", {"head_dim": 10}, "head_dim must be a multiple of 4"),
        ("gemma4", {"num_key_value_heads": 3}, "3 heads for keys must divide 2"),
        ("gemma4", {"hidden_activation": "silu"}, "hidden_activation: want 'gelu_pytorch_tanh', found 'silu'"),
        ("gemma4", {"rope_parameters": 3}, "rope_parameters: want an object, found int"),
        ("gemma4", {"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta: want a positive number, found nan"),
        ("gemma4", {"use_clipped_linears": "no"}, "use_clipped_linears: want true or false"),
        ("gemma4-unified", {"output_proj_dims": 16}, "output_proj_dims must be mm_embed_dim, which is 32, found 16"),
        ("glimmer", {"layer_types": ["full_attention"]}, "layer_types: want 4 of window_attention or full_attention"),
        ("glimmer", {"num_attention_heads": 16}, "divisible by its 16 heads times 4"),
        ("glimmer", {"merge_size": 3}, r"output must be 32 \* 3\^2 wide, found 128"),
    ],
)
def test_a_description_that_cannot_be_meant_is_refused(name: str, changes: Config, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        CASES[name].tower(vision(name, **changes))
