"""Records what mlx-vlm makes of the cases, so that the tests need no mlx-vlm.

    python -m tests.model.media.towers.record FOLDER

where FOLDER is that of `tests.lib.mlx_vlm`.
"""

import sys
import types
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from tests.lib.mlx_vlm import module, register
from tests.model.media.towers.cases import CASES, NEMOTRON, QWEN, RECORDED, Case, vision

_CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])


def without_text_model() -> None:
    """Puts nothing in place of the text model, which would import Qwen's."""
    text = types.ModuleType("mlx_vlm.models.nemotron_h_nano_omni.language")
    text.__dict__["LanguageModel"] = object
    sys.modules[text.__name__] = text


def qwen_features(case: Case) -> mx.array:
    tower = module("qwen3_vl.vision").VisionModel(module("qwen3_vl.config").VisionConfig.from_dict(vision(case)))
    weights = {name.removeprefix("model.visual."): array for name, array in case.weights.items()}
    tower.load_weights(list(tower.sanitize(weights).items()))
    twice = mx.repeat(case.patches.reshape(-1, 3, 1, 256).astype(mx.float32) / 127.5 - 1, 2, axis=2)
    features: mx.array = tower(twice.reshape(case.grid.patches, -1), mx.array([[1, *case.grid]]))[0]
    return features


def nemotron_features(case: Case) -> mx.array:
    omni = module("nemotron_h_nano_omni.nemotron_h_nano_omni")
    model: Any = omni.Model.__new__(omni.Model)
    omni.nn.Module.__init__(model)
    config = module("nemotron_h_nano_omni.config").VisionConfig.from_dict(vision(case))
    model.config = types.SimpleNamespace(
        **{key: case.config[key] for key in ("downsample_ratio", "ps_version", "projector_hidden_size")},
        vit_hidden_size=config.hidden_size,
        text_config=types.SimpleNamespace(hidden_size=64),
    )
    model.vision_model = omni.VisionModel(config)
    model.mlp1 = omni.VisionProjection(model.config)
    last = case.config.get("vision_final_layernorm") is True
    model.vision_final_layernorm = omni.nn.LayerNorm(config.hidden_size, eps=1e-6) if last else None
    weights = {name: array for name, array in model.sanitize(case.weights).items() if "temporal" not in name}
    model.load_weights(list(weights.items()))
    mean, spread = (
        mx.array(cast("list[float]", case.config.get(key) or clip))[:, None, None]
        for key, clip in zip(("norm_mean", "norm_std"), _CLIP, strict=True)
    )
    rows, columns = case.grid
    pixels = case.patches.reshape(rows, columns, 3, 16, 16).transpose(2, 0, 3, 1, 4).reshape(3, rows * 16, columns * 16)
    features: mx.array = model._extract_feature_single((pixels.astype(mx.float32) / 255 - mean) / spread)[0]
    return features


def main() -> None:
    register(Path(sys.argv[1]), ("qwen3_vl", "nemotron_h", "nemotron_h_nano_omni"))
    without_text_model()
    recorded = {case.name: qwen_features(case) for case in QWEN}
    recorded |= {case.name: nemotron_features(case) for case in NEMOTRON}
    assert recorded.keys() == {case.name for case in CASES}
    mx.save_safetensors(str(RECORDED), recorded)


if __name__ == "__main__":
    main()
