"""Draws scenes: a filled circle before a background with a gradient and noise."""

import random
from io import BytesIO
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from scripts.tools.demo.seeing.world import COLOURS, PLACES, Scene

SIZES = ((256, 256), (128, 128), (96, 96), (320, 256), (256, 320), (200, 150), (384, 192), (180, 300))
"""Width and height in pixels. Small ones are stretched by the runner; their grids are of five different forms."""
_RADII = (0.17, 0.24)
"""Of circles, as shares of the picture's shorter side."""
_SHIFT = 0.04
"""The most that a circle is off its place, as a share of a side."""
_DETAIL = 2
"""Circles are drawn so many times larger, for smooth edges."""


def trained_seed(rng: random.Random) -> int:
    """Returns a seed for a picture that is trained on: an even number."""
    return rng.getrandbits(31) * 2


def held_out_seed(rng: random.Random) -> int:
    """Returns a seed for a picture that training never shows."""
    return rng.getrandbits(31) * 2 + 1


class Drawing(NamedTuple):
    """A picture, and where its circle is: white before black, of the same size."""

    picture: Image.Image
    circle: Image.Image


def draw(scene: Scene, seed: int, size: tuple[int, int] | None = None) -> Drawing:
    """Returns a picture of a scene, of `size` or of one of `SIZES`. The same seed draws the same picture."""
    rng = random.Random(seed)
    width, height = size or rng.choice(SIZES)
    across, down = (share + rng.uniform(-_SHIFT, _SHIFT) for share in PLACES[scene.place])
    radius = rng.uniform(*_RADII) * min(width, height)
    large = Image.new("L", (width * _DETAIL, height * _DETAIL))
    left, top, right, bottom = (
        _DETAIL * edge
        for edge in (across * width - radius, down * height - radius, across * width + radius, down * height + radius)
    )
    ImageDraw.Draw(large).ellipse((left, top, right, bottom), fill=255)
    circle = large.resize((width, height), Image.Resampling.BOX)
    picture = Image.fromarray(_background(rng, width, height))
    colour = tuple(min(255, max(0, part + rng.randint(-18, 18))) for part in COLOURS[scene.colour])
    picture.paste(colour, (0, 0, width, height), circle)
    most = rng.randint(1, 16)
    noise = np.random.default_rng(seed).integers(-most, most, (height, width, 3), dtype=np.int16, endpoint=True)
    return Drawing(Image.fromarray(np.clip(np.asarray(picture) + noise, 0, 255).astype(np.uint8)), circle)


def png(scene: Scene, seed: int, size: tuple[int, int] | None = None) -> bytes:
    """Returns the file of a picture."""
    stream = BytesIO()
    draw(scene, seed, size).picture.save(stream, "PNG")
    return stream.getvalue()


def _background(rng: random.Random, width: int, height: int) -> np.ndarray:
    """Returns uint8 [height, width, 3]: greys with a little colour, from one corner to another."""
    grey = rng.choice((rng.randint(15, 70), rng.randint(110, 150), rng.randint(185, 240)))
    tint = np.array([rng.randint(-14, 14) for _ in range(3)])
    slope = np.linspace(-1, 1, width)[None] * rng.uniform(-20, 20) + np.linspace(-1, 1, height)[:, None] * rng.uniform(
        -20, 20
    )
    return np.clip(grey + tint + slope[..., None], 0, 255).astype(np.uint8)
