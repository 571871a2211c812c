"""Records what mlx-vlm makes of `sound_cases`:

    python -m tests.model.media.towers.record_sound FOLDER

where FOLDER is that of `tests.lib.mlx_vlm`.
"""

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from runner.media.towers.gemma4_sound import Gemma4SoundTower
from tests.lib.mlx_vlm import module, register
from tests.model.media.towers import sound_cases as cases
from tests.model.media.towers.gemma_cases import WIDTH, Weights, distance, parameters


def _load(layer: Any, weights: Weights) -> None:
    """Gives a module those weights that it knows; of clamps that do nothing, the neutral ones."""
    known = dict(tree_flatten(layer.parameters()))
    layer.load_weights([(name, array) for name, array in weights.items() if name in known], strict=False)


def conformer(config: Any, weights: Weights, rows: mx.array) -> Any:
    """What mlx-vlm makes of one piece, without padding."""
    audio = module("gemma4.config").AudioConfig.from_dict(config["audio_config"])
    encoder = module("gemma4.audio").AudioEncoder(audio)
    embedder = module("gemma4.gemma4").MultimodalEmbedder(audio.output_proj_dims, WIDTH, audio.rms_norm_eps)
    _load(encoder, weights)
    _load(embedder, weights)
    encoded, _ = encoder(rows[None], mx.zeros((1, len(rows)), mx.bool_))
    return embedder(encoded)[0]


def unified(config: Any, weights: Weights, rows: mx.array) -> Any:
    """What mlx-vlm makes of samples as they are."""
    audio = config["audio_config"]
    embedder = module("gemma4.gemma4").MultimodalEmbedder(
        audio["audio_samples_per_token"], WIDTH, audio["rms_norm_eps"]
    )
    _load(embedder, weights)
    return embedder(rows[None])[0]


def main() -> None:
    """Writes the recording, and says how far our towers are from it."""
    register(Path(sys.argv[1]), ("gemma4", "gemma4_unified"))
    found: dict[str, mx.array] = {}
    for name, count in cases.SOUNDS:
        tower, rows = cases.make_tower(name), cases.make_rows(name, count)
        compute = conformer if isinstance(tower, Gemma4SoundTower) else unified
        expected = compute(cases.CASES[name].config, parameters(tower), rows)  # type: ignore[arg-type]
        found[cases.key(name, count)] = expected
        away = distance(cases.features(tower, rows, [count]), expected)
        print(f"{cases.key(name, count):28} {tuple(expected.shape)!s:10} away by {away:.1e}")  # noqa: T201 - a script
    mx.save_safetensors(str(cases.RECORDED), found)


if __name__ == "__main__":
    main()
