"""Photos that were never seen, from a seed."""

import io
from random import Random

from PIL import Image

_QUALITY = 90


class Photos:
    """Makes JPEGs as large as those of a camera: smooth shapes under a little noise."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def jpeg(self, width: int, height: int) -> bytes:
        """Returns a new photo."""
        colours = bytes(self._random.randrange(256) for _ in range(8 * 6 * 3))
        smooth = Image.frombytes("RGB", (8, 6), colours).resize((width, height), Image.Resampling.BICUBIC)
        grain = Image.effect_noise((width, height), 20).convert("RGB")
        file = io.BytesIO()
        Image.blend(smooth, grain, 0.2).save(file, "JPEG", quality=_QUALITY)
        return file.getvalue()
