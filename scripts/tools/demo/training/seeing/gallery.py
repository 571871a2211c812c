"""The pictures that the model is trained on: drawn once, prepared as the runner prepares them."""

import random
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from PIL import Image

from runner.media.families.qwen3_5 import Qwen35
from runner.model.towers import Grid
from scripts.tools.demo.seeing.drawing import SIZES, draw, trained_seed
from scripts.tools.demo.seeing.world import Scene, scenes


class Exhibit(NamedTuple):
    """A picture of a scene as the tower takes it."""

    scene: Scene
    patches: mx.array
    """uint8 [count, values]"""
    grid: Grid
    rows: int
    columns: int
    """Soft tokens."""
    covered: np.ndarray
    """The share of each soft token that the circle covers, 0 to 1 [soft tokens]."""


def gallery(family: Qwen35, count: int, seed: int) -> list[Exhibit]:
    """Returns `count` pictures, of each size about as many."""
    rng = random.Random(seed)
    return [
        exhibit(family, rng.choice(scenes()), trained_seed(rng), SIZES[index % len(SIZES)]) for index in range(count)
    ]


def exhibit(family: Qwen35, scene: Scene, seed: int, size: tuple[int, int]) -> Exhibit:
    """Draws one picture."""
    picture, circle = draw(scene, seed, size)
    geometry = family.geometry(*picture.size)
    resized = picture.resize((geometry.width, geometry.height), Image.Resampling.BICUBIC)
    soft = circle.resize((geometry.token_columns, geometry.token_rows), Image.Resampling.BOX)
    return Exhibit(
        scene,
        mx.array(family.patches(np.array(resized), geometry)),
        Grid(geometry.rows, geometry.columns),
        geometry.token_rows,
        geometry.token_columns,
        np.asarray(soft, np.float32).reshape(-1) / 255,
    )
