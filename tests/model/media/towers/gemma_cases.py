"""Tiny towers of Gemma 4 and Glimmer with pictures of noise, the same on every machine.

`recorded/gemma.safetensors` has what mlx-vlm makes of them (see `record_gemma`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from runner.media.towers.gemma4 import Gemma4Tower, Gemma4UnifiedTower
from runner.media.towers.glimmer import GlimmerTower
from runner.media.towers.tower import Grid, Tower

RECORDED = Path(__file__).parent / "recorded" / "gemma.safetensors"
WIDTH = 24
Config = dict[str, object]
Weights = dict[str, mx.array]

GEMMA4: Config = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 3,
    "position_embedding_size": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "use_clipped_linears": False,
    "standardize": False,
}
UNIFIED: Config = {
    "model_type": "gemma4_unified_vision",
    "model_patch_size": 6,
    "mm_embed_dim": 32,
    "mm_posemb_size": 16,
    "output_proj_dims": 32,
    "rms_norm_eps": 1e-6,
}
GLIMMER: Config = {
    "model_type": "muse_glimmer_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "patch_size": 3,
    "patch_temporal": 2,
    "merge_size": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "layer_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "layer_types": ["window_attention", "full_attention", "window_attention", "full_attention"],
}


class Case(NamedTuple):
    """A tower and the grids of pictures for it."""

    tower: type[Tower]
    config: Config
    grids: tuple[Grid, ...]


def _gemma4(**changes: object) -> Config:
    return {"text_config": {"hidden_size": WIDTH}, "vision_config": {**GEMMA4, **changes}}


_GLIMMER: Config = {
    "text_config": {"hidden_size": WIDTH},
    "vision_config": GLIMMER,
    "out_hidden_size": 128,
    "projector_hidden_size": 40,
}
_THREES = (Grid(3, 3), Grid(6, 9), Grid(9, 3), Grid(3, 12), Grid(9, 9))
CASES: Mapping[str, Case] = {
    "gemma4": Case(Gemma4Tower, _gemma4(), _THREES),
    "gemma4-standardize": Case(Gemma4Tower, _gemma4(standardize=True), _THREES[:2]),
    "gemma4-clamped": Case(Gemma4Tower, _gemma4(use_clipped_linears=True), _THREES[:2]),
    "gemma4-grouped": Case(Gemma4Tower, _gemma4(num_attention_heads=4, head_dim=8, num_key_value_heads=2), _THREES[:2]),
    "gemma4-unified": Case(
        Gemma4UnifiedTower,
        {"text_config": {"hidden_size": WIDTH}, "vision_config": UNIFIED},
        (Grid(1, 1), Grid(3, 5), Grid(1, 7), Grid(7, 1)),
    ),
    "glimmer": Case(
        GlimmerTower, _GLIMMER, (Grid(2, 2), Grid(4, 4), Grid(6, 10), Grid(2, 14), Grid(10, 4), Grid(8, 8))
    ),
}
NAMES = tuple(CASES)
PICTURES = tuple((name, grid) for name, case in CASES.items() for grid in case.grids)


def parameters(tower: Module) -> Weights:
    """The parameters by name."""
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(Module.parameters(tower))))


def make_weights(tower: Module, *, clamped: bool = True) -> Weights:
    """Noise for every parameter, but for bounds unless `clamped`. No function of MLX that could round differently
    elsewhere takes part."""
    mx.random.seed(0)
    weights: Weights = {}
    for name, array in sorted(parameters(tower).items()):
        noise = mx.random.randint(-1000, 1001, array.shape).astype(mx.float32) / 1000
        last = name.rpartition(".")[2]
        if last.endswith(("_min", "_max")):  # within what the layers compute, so that the bounds do something
            if clamped:
                weights[name] = (mx.abs(noise) + 0.2) * (-1 if last.endswith("_min") else 1)
        elif "norm" in name or "ln" in name or last == "std_scale":
            weights[name] = noise * 0.3 + (0 if last == "bias" else 1)
        else:
            weights[name] = noise * (2.5 / array.shape[-1] ** 0.5 if array.ndim == 2 else 0.5)
    return weights


def make_tower(name: str) -> Tower:
    """The tower of a case, its weights as they are recorded."""
    case = CASES[name]
    tower = case.tower(case.config)
    weights = make_weights(tower)
    tower.load_weights(list(weights.items()), strict=True)
    return tower


def make_patches(name: str, grid: Grid) -> mx.array:
    """Noise as patches, uint8 [count, values]."""
    vision = cast("Config", CASES[name].config["vision_config"])
    side = cast("int", vision.get("model_patch_size") or vision["patch_size"])
    mx.random.seed(grid.rows * 1000 + grid.columns)
    return mx.random.randint(0, 256, (grid.patches, 3 * side**2)).astype(mx.uint8)


def features(tower: Any, *medium: object) -> mx.array:
    """The last array that the tower yields, each of them evaluated in turn."""
    for array in tower.encode(*medium):
        mx.eval(array)
    return cast("mx.array", array)


def key(name: str, grid: Grid) -> str:
    """The name of a recorded array."""
    return f"{name} {grid.rows}x{grid.columns}"


def distance(found: mx.array, expected: mx.array) -> float:
    """The largest difference, relative to the largest number that was expected."""
    assert found.shape == expected.shape
    return cast("float", (mx.abs(found - expected).max() / mx.abs(expected).max()).item())
