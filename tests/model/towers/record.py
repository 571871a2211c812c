"""Records what mlx-vlm makes of the cases, so that the tests need no mlx-vlm.

It needs the package and Pillow in a folder of their own, without what else mlx-vlm asks for:

    pip install --no-deps --target FOLDER mlx-vlm==0.7.10 pillow
    python -m tests.model.towers.record FOLDER
"""

import importlib
import sys
import types
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from tests.model.towers.cases import CASES, NEMOTRON, QWEN, RECORDED, Case, vision

_PACKAGES = ("", ".models", ".models.qwen3_vl", ".models.nemotron_h", ".models.nemotron_h_nano_omni")
_CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])


def register(folder: Path) -> None:
    """Makes mlx-vlm's towers importable without running the `__init__` of its packages, which import everything."""
    sys.path.append(str(folder))
    for suffix in _PACKAGES:
        module = types.ModuleType(f"mlx_vlm{suffix}")
        module.__path__ = [str(folder.joinpath("mlx_vlm", *suffix.split(".")[1:]))]
        sys.modules[module.__name__] = module
    text = types.ModuleType("mlx_vlm.models.nemotron_h_nano_omni.language")  # the text model, which would import Qwen's
    text.__dict__["LanguageModel"] = object
    sys.modules[text.__name__] = text


def load(name: str) -> Any:
    """A module of mlx-vlm, which is not installed where this is type-checked."""
    return importlib.import_module(name)


def qwen_features(case: Case) -> mx.array:
    folder = "mlx_vlm.models.qwen3_vl"
    tower = load(f"{folder}.vision").VisionModel(load(f"{folder}.config").VisionConfig.from_dict(vision(case)))
    weights = {name.removeprefix("model.visual."): array for name, array in case.weights.items()}
    tower.load_weights(list(tower.sanitize(weights).items()))
    twice = mx.repeat(case.patches.reshape(-1, 3, 1, 256).astype(mx.float32) / 127.5 - 1, 2, axis=2)
    features: mx.array = tower(twice.reshape(case.grid.patches, -1), mx.array([[1, *case.grid]]))[0]
    return features


def nemotron_features(case: Case) -> mx.array:
    folder = "mlx_vlm.models.nemotron_h_nano_omni"
    module = load(f"{folder}.nemotron_h_nano_omni")
    model: Any = module.Model.__new__(module.Model)
    module.nn.Module.__init__(model)
    config = load(f"{folder}.config").VisionConfig.from_dict(vision(case))
    model.config = types.SimpleNamespace(
        **{key: case.config[key] for key in ("downsample_ratio", "ps_version", "projector_hidden_size")},
        vit_hidden_size=config.hidden_size,
        text_config=types.SimpleNamespace(hidden_size=64),
    )
    model.vision_model = module.VisionModel(config)
    model.mlp1 = module.VisionProjection(model.config)
    last = case.config.get("vision_final_layernorm") is True
    model.vision_final_layernorm = module.nn.LayerNorm(config.hidden_size, eps=1e-6) if last else None
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
    register(Path(sys.argv[1]))
    recorded = {case.name: qwen_features(case) for case in QWEN}
    recorded |= {case.name: nemotron_features(case) for case in NEMOTRON}
    assert recorded.keys() == {case.name for case in CASES}
    mx.save_safetensors(str(RECORDED), recorded)


if __name__ == "__main__":
    main()
