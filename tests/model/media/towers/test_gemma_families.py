"""The towers of Gemma 4 and Glimmer: what mlx-vlm makes of the same weights, in pieces, packed, and under any name."""

import re
from typing import cast

import mlx.core as mx
import pytest

from runner.errors import ModelError
from runner.media.towers.gemma4 import ClampedLinear, Gemma4Tower, Gemma4UnifiedTower
from runner.media.towers.glimmer import GlimmerTower, _windows, stretched_table
from runner.media.towers.tower import Grid
from runner.media.towers.tower_plan import TOWERS
from tests.model.media.towers.cases import peak_bytes
from tests.model.media.towers.gemma_cases import (
    CASES,
    NAMES,
    PICTURES,
    RECORDED,
    WIDTH,
    Config,
    Weights,
    distance,
    features,
    key,
    make_patches,
    make_tower,
    make_weights,
    parameters,
)

CLOSE = 1e-5


def largest(name: str) -> Grid:
    return max(CASES[name].grids, key=lambda grid: grid.patches)


@pytest.mark.parametrize(("name", "grid"), PICTURES, ids=lambda value: str(value).replace(" ", ""))
def test_features_are_those_of_mlx_vlm(name: str, grid: Grid) -> None:
    recorded = cast("Weights", mx.load(str(RECORDED)))
    found = features(make_tower(name), make_patches(name, grid), grid)
    assert found.shape[1] == make_tower(name).width == WIDTH
    assert distance(found, recorded[key(name, grid)]) <= CLOSE


@pytest.mark.parametrize("name", NAMES)
def test_pieces_make_no_difference(name: str) -> None:
    grid = largest(name)
    patches = make_patches(name, grid)
    tower = make_tower(name)
    whole = list(tower.encode(patches, grid))
    tower.piece_bytes = 7 * 2 * 4 * grid.patches  # seven queries of two heads
    cut = list(tower.encode(patches, grid))
    assert distance(cut[-1], whole[-1]) <= CLOSE
    if name != "gemma4-unified":
        assert len(cut) > len(whole) + grid.patches // 7
        assert max(array.nbytes for array in cut[1:-1]) <= grid.patches * 4 * 32  # none has scores in it


@pytest.mark.parametrize("name", NAMES)
def test_memory_stays_below_the_estimate(name: str) -> None:
    tower, grid = make_tower(name), Grid(18, 12) if name != "gemma4-unified" else Grid(16, 16)
    patches = make_patches(name, grid)
    for piece_bytes in (1 << 26, 1 << 14):
        tower.piece_bytes = piece_bytes
        mx.eval(patches)
        taken = peak_bytes(tower, lambda: features(tower, patches, grid))
        assert taken <= tower.encode_bytes(grid) <= 4 * taken


@pytest.mark.parametrize("name", NAMES)
def test_sixteen_bits_stay_sixteen_bits(name: str) -> None:
    grid, tower = CASES[name].grids[1], make_tower(name)
    patches = make_patches(name, grid)
    exact = features(tower, patches, grid)
    tower.set_dtype(mx.bfloat16)
    arrays = list(tower.encode(patches, grid))
    assert {array.dtype for array in arrays} == {mx.bfloat16}
    assert distance(arrays[-1].astype(mx.float32), exact) < 0.2


def _linear(tower: Gemma4Tower) -> ClampedLinear:
    found: ClampedLinear = tower.encoder.layers[0].self_attn.q_proj
    return found


def test_a_linear_has_four_bounds_or_none() -> None:
    config = CASES["gemma4-clamped"].config
    weights = make_weights(make_tower("gemma4-clamped"))
    name = "encoder.layers.0.self_attn.q_proj"
    tower = Gemma4Tower(config)
    flat = {each: array.reshape(1) if each.endswith(("_min", "_max")) else array for each, array in weights.items()}
    tower.load_weights(list(tower.sanitize(flat).items()), strict=True)
    assert "input_min" in _linear(tower)
    assert _linear(tower).input_min.shape == ()

    tower = Gemma4Tower(config)
    without = {each: array for each, array in weights.items() if not re.match(rf"{name}\.\w+_m", each)}
    tower.load_weights(list(tower.sanitize(without).items()), strict=True)
    assert "input_min" not in _linear(tower)
    assert "input_min" in tower.encoder.layers[1].self_attn.q_proj

    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_proj must have all four .*missing: output_max$"):
        tower.sanitize({each: array for each, array in weights.items() if each != f"{name}.output_max"})
    packed = {f"{name}.linear.weight": weights[f"{name}.linear.weight"]}  # scales come like this
    tower = Gemma4Tower(config)
    assert tower.sanitize(packed) == packed
    assert "input_min" in _linear(tower)


def test_windows_are_cut_as_the_original_cuts_them() -> None:
    order, windows = _windows(Grid(3, 5), Grid(2, 3))
    assert order.tolist() == [0, 1, 2, 5, 6, 7, 3, 4, 8, 9, 10, 11, 12, 13, 14]
    assert windows == [slice(0, 6), slice(6, 10), slice(10, 13), slice(13, 15)]


def test_positions_of_a_wide_picture_run_along_its_rows() -> None:
    table = mx.array([[10.0 * row + column] for row in range(4) for column in range(4)])
    same = stretched_table(table, Grid(4, 4), Grid(4, 4)).reshape(4, 4)
    assert same.tolist() == table.reshape(4, 4).tolist()
    wide = stretched_table(table, Grid(4, 4), Grid(4, 8)).reshape(4, 8)[:, 1:-1]  # outside of the table are zeros
    assert mx.allclose(wide, 10 * mx.arange(4)[:, None] + (mx.arange(1, 7)[None] - 0.5) / 2, atol=1e-5)
    uneven = stretched_table(table.reshape(2, 8).T.reshape(16, 1)[:8], Grid(2, 4), Grid(2, 4))
    assert uneven.shape == (8, 1)


def test_a_picture_with_more_patches_than_positions_is_refused() -> None:
    tower = make_tower("gemma4-unified")
    grid = Grid(17, 1)
    with pytest.raises(ValueError, match=r"16 x 16 positions are too few"):
        list(tower.encode(mx.zeros((17, 108), mx.uint8), grid))


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
