"""Tiny towers with reproducible weights and pictures, for comparing them with another implementation.

Weights are whole numbers divided by a power of two, so that they are the same to the bit on every machine.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from runner.media.towers.nemotron_h import NemotronTower
from runner.media.towers.qwen3_5 import Qwen35Tower
from runner.media.towers.tower import Grid, Tower
from runner.model.architectures import architecture_of, family_of
from runner.model.module_config import read_config
from runner.model.opened import OpenedModel
from runner.model.sources.model_directory import open_directory
from scripts.tools.models.sources_form import Config, Shape
from scripts.tools.models.sources_towers import (
    NEMOTRON_AROUND,
    NEMOTRON_VISION,
    QWEN_VISION,
    nemotron_tensors,
    qwen_tensors,
)
from tests.lib.kernels import mlx_own

RECORDED = Path(__file__).parent / "recorded.safetensors"
PATCH_VALUES = 3 * 16 * 16
_STEPS = 1 << 15


class Case(NamedTuple):
    """`config` is a whole `config.json`, `shapes` are those of the published tensors of the tower."""

    name: str
    config: Config
    shapes: Mapping[str, Shape]
    grid: Grid

    @property
    def weights(self) -> dict[str, mx.array]:
        """The published tensors, float32; norms are around one."""
        return {name: random(name, shape) for name, shape in self.shapes.items()}

    @property
    def patches(self) -> mx.array:
        """The bytes of a picture, uint8 [patches, values]."""
        return mx.random.randint(0, 256, (self.grid.patches, PATCH_VALUES), key=mx.random.key(7)).astype(mx.uint8)


def random(name: str, shape: Shape) -> mx.array:
    """Evenly spread numbers that keep the scale of what passes through a layer of them; `name` is their seed."""
    seed = int.from_bytes(name.encode()) % 1_000_003
    numbers = mx.random.randint(1 - _STEPS, _STEPS, shape, key=mx.random.key(seed)).astype(mx.float32) / _STEPS
    if len(shape) == 1:
        return numbers / 4 + (1 if "norm" in name and name.endswith("weight") else 0)
    inputs = shape[-1] if len(shape) < 4 else math.prod(shape[1:])
    return numbers * 2.0 ** round(math.log2(math.sqrt(3 / inputs)))


def _qwen(name: str, rows: int, columns: int, text_width: int = 64, **changes: object) -> Case:
    vision = {**QWEN_VISION, **changes, "out_hidden_size": text_width}
    config: Config = {"model_type": "qwen3_5", "vision_config": vision, "text_config": {"hidden_size": text_width}}
    return Case(f"qwen-{name}", config, qwen_tensors("model.visual.", text_width, **changes), Grid(rows, columns))


def _nemotron(name: str, rows: int, columns: int, vision: Config | None = None, **changes: object) -> Case:
    vision = {**NEMOTRON_VISION, **(vision or {})}
    config: Config = {"vision_config": vision, "llm_config": {"hidden_size": 64}, **NEMOTRON_AROUND, **changes}
    shapes = nemotron_tensors()
    if changes.get("vision_final_layernorm"):
        shapes |= {f"vision_projector.vision_final_layernorm.{part}": (64,) for part in ("weight", "bias")}
    return Case(f"nemotron-{name}", config, shapes, Grid(rows, columns))


QWEN = (
    _qwen("one-token", 2, 2),
    _qwen("one-row", 2, 10),
    _qwen("one-column", 10, 2),
    _qwen("odd", 6, 10),
    _qwen("square", 14, 14),
    _qwen("heads-of-72", 4, 6, hidden_size=144, num_heads=2, intermediate_size=200),
    _qwen("narrow-text", 6, 4, 32, depth=1),
)
NEMOTRON = (
    _nemotron("one-token", 2, 2),
    _nemotron("one-row", 2, 8),
    _nemotron("one-column", 8, 2),
    _nemotron("as-the-table", 6, 6),
    _nemotron("odd", 6, 10),
    _nemotron("beyond-the-table", 14, 4),
    _nemotron("by-columns", 4, 6, ps_version="v1"),
    _nemotron("other-colours", 4, 4, norm_mean=[0.5, 0.25, 0.75], norm_std=[0.5, 1.0, 0.25]),
    _nemotron("last-norm", 4, 6, vision_final_layernorm=True),
    _nemotron("older", 4, 6, {"version": "radio_v2.5-h"}),
)
CASES = (*QWEN, *NEMOTRON)


def vision(case: Case) -> Config:
    return cast("Config", case.config["vision_config"])


def opened_tower(directory: Path, config: Mapping[str, object], weights: Mapping[str, mx.array]) -> OpenedModel:
    """Writes a model with nothing but a tower, and opens it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(directory / "model.safetensors"), dict(weights))
    return reopened(directory)


def reopened(directory: Path) -> OpenedModel:
    checkpoint = open_directory(directory, "tiny", lambda _: None)
    config = read_config(checkpoint)
    architecture = architecture_of(config, from_store=True)
    family = family_of(architecture, config)
    return OpenedModel("tiny", architecture, family, config, {}, {}, 0, 0, checkpoint)


def made(case: Case, weights: Mapping[str, mx.array] | None = None) -> Tower:
    """The tower of a case, made without files, with the published tensors `weights` instead of its own if given."""
    tower = (Qwen35Tower if case.name.startswith("qwen") else NemotronTower)(case.config)
    found = case.weights if weights is None else weights
    named = {name: array for key, array in found.items() if (name := tower.parameter_name(key)) is not None}
    tower.load_weights(list(tower.sanitize(named).items()))
    return tower


def encoded(tower: Tower, case: Case) -> Iterator[mx.array]:
    """Yields each part of a tower's work on the picture of a case, evaluated."""
    for step in tower.encode(case.patches, case.grid):
        mx.eval(step)
        yield step


def features(tower: Tower, case: Case) -> mx.array:
    return list(encoded(tower, case))[-1]


def peak_bytes(tower: Module, encode: Callable[[], object]) -> int:
    """The most bytes that `encode` takes at a moment, by MLX's own kernels: ours keep no scores."""
    mx.eval(tower.state)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with mlx_own():
        encode()
    return mx.get_peak_memory() - before
