"""Records what mlx-vlm makes of `gemma_cases` and `sound_cases`:

    python -m tests.model.media.towers.record_gemma FOLDER

where FOLDER is that of `tests.lib.mlx_vlm`.
"""

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from runner.media.towers.gemma4_sound import Gemma4SoundTower
from runner.media.towers.tower import Grid
from tests.lib.mlx_vlm import module, register
from tests.model.media.towers import gemma_cases as cases
from tests.model.media.towers import sound_cases as sounds


def _places(grid: Grid) -> mx.array:
    """Column and row of every patch, [1, patches, 2]."""
    return mx.array([[(column, row) for row in range(grid.rows) for column in range(grid.columns)]])


def _load(layer: Any, weights: cases.Weights, prefix: str = "", *, strict: bool = True) -> None:
    """Gives a module the weights whose names begin with `prefix`, and that it knows."""
    known = dict(tree_flatten(layer.parameters()))
    mine = {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}
    layer.load_weights([(name, array) for name, array in mine.items() if name in known], strict=strict)


def _gemma4(config: Any, weights: cases.Weights, patches: mx.array, grid: Grid) -> Any:
    vision = module("gemma4.config").VisionConfig(**config["vision_config"])
    tower = module("gemma4.vision").VisionModel(vision)
    embedder = module("gemma4.gemma4").MultimodalEmbedder(vision.hidden_size, cases.WIDTH, vision.rms_norm_eps)
    _load(tower, weights)
    _load(embedder, weights)
    return embedder(tower(patches[None] / 255, _places(grid)))[0]


def _unified(config: Any, weights: cases.Weights, patches: mx.array, grid: Grid) -> Any:
    vision = module("gemma4_unified.config").VisionConfig(**config["vision_config"])
    tower = module("gemma4_unified.gemma4_unified").VisionEmbedder(vision)
    embedder = module("gemma4.gemma4").MultimodalEmbedder(vision.output_proj_dims, cases.WIDTH, vision.rms_norm_eps)
    _load(tower, weights)
    _load(embedder, weights)
    return embedder(tower(patches[None] / 255, _places(grid)))[0]


def _glimmer(config: Any, weights: cases.Weights, patches: mx.array, grid: Grid) -> Any:
    """Without the norm at the end, which is the text model's business here."""
    settings = module("muse_glimmer.config").ModelConfig.from_dict(config)
    tower = module("muse_glimmer.vision").VisionModel(settings.vision_config)
    adapter = module("muse_glimmer.muse_glimmer").VisionAdapter(settings)
    _load(tower, weights)
    _load(adapter, weights, "vision_adapter.")
    frames = mx.tile(patches / 127.5 - 1, (1, settings.vision_config.patch_temporal))
    return adapter(tower(frames, mx.array([[1, *grid]]))) @ weights["vision_projection.weight"].T


def _conformer(config: Any, weights: cases.Weights, rows: mx.array) -> Any:
    """One piece, without padding. Clamps that do nothing stay the neutral ones."""
    audio = module("gemma4.config").AudioConfig.from_dict(config["audio_config"])
    encoder = module("gemma4.audio").AudioEncoder(audio)
    embedder = module("gemma4.gemma4").MultimodalEmbedder(audio.output_proj_dims, cases.WIDTH, audio.rms_norm_eps)
    _load(encoder, weights, strict=False)
    _load(embedder, weights, strict=False)
    encoded, _ = encoder(rows[None], mx.zeros((1, len(rows)), mx.bool_))
    return embedder(encoded)[0]


def _samples(config: Any, weights: cases.Weights, rows: mx.array) -> Any:
    audio = config["audio_config"]
    width, eps = audio["audio_samples_per_token"], audio["rms_norm_eps"]
    embedder = module("gemma4.gemma4").MultimodalEmbedder(width, cases.WIDTH, eps)
    _load(embedder, weights, strict=False)
    return embedder(rows[None])[0]


_ORACLES = {"gemma4": _gemma4, "gemma4-unified": _unified, "glimmer": _glimmer}


def main() -> None:
    """Writes the recordings, and says how far our towers are from them."""
    register(Path(sys.argv[1]), ("gemma4", "gemma4_unified", "muse_glimmer"))
    found: dict[str, mx.array] = {}
    for name, grid in cases.PICTURES:
        case, tower = cases.CASES[name], cases.make_tower(name)
        compute = _ORACLES.get(name) or _ORACLES[name.partition("-")[0]]
        patches = cases.make_patches(name, grid)
        expected = compute(case.config, cases.parameters(tower), patches.astype(mx.float32), grid)
        found[cases.key(name, grid)] = expected
        _say(cases.key(name, grid), cases.features(tower, patches, grid), expected)
    cases.RECORDED.parent.mkdir(exist_ok=True)
    mx.save_safetensors(str(cases.RECORDED), found)
    heard: dict[str, mx.array] = {}
    for name, count in sounds.SOUNDS:
        hearing, rows = sounds.make_tower(name), sounds.make_rows(name, count)
        oracle = _conformer if isinstance(hearing, Gemma4SoundTower) else _samples
        expected = oracle(sounds.CASES[name].config, cases.parameters(hearing), rows)
        heard[sounds.key(name, count)] = expected
        _say(sounds.key(name, count), cases.features(hearing, rows, [count]), expected)
    mx.save_safetensors(str(sounds.RECORDED), heard)


def _say(key: str, found: mx.array, expected: mx.array) -> None:
    away = cases.distance(found, expected)
    print(f"{key:28} {tuple(expected.shape)!s:10} away by {away:.1e}")  # noqa: T201 - a script


if __name__ == "__main__":
    main()
