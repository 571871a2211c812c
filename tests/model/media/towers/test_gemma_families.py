"""The towers of Gemma 4 and Glimmer: what mlx-vlm makes of the same weights, in pieces, packed, and under any name."""

import re
from typing import cast

import mlx.core as mx
import pytest

from runner.errors import ModelError
from runner.media.towers.gemma4 import ClampedLinear, Gemma4Tower
from runner.media.towers.glimmer import _windows, stretched_table
from runner.media.towers.tower import Grid
from tests.lib.kernels import mlx_own
from tests.model.media.towers.gemma_cases import (
    CASES,
    NAMES,
    PICTURES,
    RECORDED,
    WIDTH,
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
        mx.eval(parameters(tower), patches)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        with mlx_own():  # ours keep no scores
            features(tower, patches, grid)
        taken = mx.get_peak_memory() - before
        assert taken <= tower.encode_bytes(grid) <= 4 * taken


@pytest.mark.parametrize("name", NAMES)
def test_sixteen_bits_stay_sixteen_bits(name: str) -> None:
    dtype = mx.bfloat16
    grid, tower = CASES[name].grids[1], make_tower(name)
    patches = make_patches(name, grid)
    exact = features(tower, patches, grid)
    tower.set_dtype(dtype)
    arrays = list(tower.encode(patches, grid))
    assert {array.dtype for array in arrays} == {dtype}
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
