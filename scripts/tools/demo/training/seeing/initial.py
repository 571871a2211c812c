"""The tower's initial weights: random, but for what a patch is first looked at for.

Each patch is read as its mean colour and as the lowest frequencies of its brightness, in which edges show; the table of
positions has waves in dimensions of its own. Training then changes every weight.
"""

import mlx.core as mx
import numpy as np

from runner.model.towers.qwen3_5 import Qwen35Tower

_WAVES = 4
"""Of the table of positions, along each axis; each takes two dimensions."""
_COLOUR_GAIN, _EDGE_GAIN, _PLACE_GAIN, _OTHER = 1.5, 3.0, 0.7, 0.02


def set_weights(tower: Qwen35Tower, seed: int) -> None:
    """Sets the patch embedding and the table of positions."""
    rng = np.random.default_rng(seed)
    width, patch = tower.patch_embed.bias.size, tower.patch
    free = width - 4 * _WAVES
    kernel = rng.normal(0, _OTHER / patch, (width, 3, patch, patch))
    kernel[:3] = np.eye(3)[:, :, None, None] * (_COLOUR_GAIN / patch**2)
    frequencies = sorted(((u, v) for u in range(patch) for v in range(patch) if u + v), key=lambda uv: (sum(uv), uv))
    for index, (u, v) in enumerate(frequencies[: free - 3], start=3):
        kernel[index] += np.outer(_wave(u, patch), _wave(v, patch)) * (_EDGE_GAIN / patch**2 / 3)
    tower.patch_embed.weight = mx.array(kernel.reshape(width, -1).astype(np.float32))
    tower.patch_embed.bias = mx.zeros(width)

    table = rng.normal(0, _OTHER, (tower.side, tower.side, width))
    at = np.arange(tower.side) / (tower.side - 1)
    for index in range(_WAVES):
        for offset, turn in enumerate((np.cos, np.sin)):
            wave = _PLACE_GAIN * turn(np.pi * at * (index + 1) / 2)
            table[:, :, free + 4 * index + offset] += wave[:, None]
            table[:, :, free + 4 * index + 2 + offset] += wave[None]
    tower.pos_embed.weight = mx.array(table.reshape(-1, width).astype(np.float32))


def _wave(frequency: int, count: int) -> np.ndarray:
    """Returns a cosine over the values of one side [count]."""
    return np.cos(np.pi * frequency * (np.arange(count) + 0.5) / count) * (2**0.5 if frequency else 1)
