"""The recordings that `record.py` made of transformers' image processors, and their pictures."""

import json
from pathlib import Path
from typing import TypedDict

PATH = Path(__file__).with_name("processors.json")

_SHAPES = [(160, 100), (640, 480), (33, 700), (1, 1), (1000, 37)]
ROW_CASES = {
    "qwen3_5": [*((*shape, 16_777_216) for shape in _SHAPES), (400, 3000, 300_000)],
    "gemma4": [*((*shape, 280) for shape in _SHAPES), (31, 2500, 1120)],
}
"""Family -> width and height of pictures, and the family's limit: pixels for qwen3_5, soft tokens for gemma4."""

_SIDES = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 100, 223, 224, 255, 256, 257, 333, 480, 640, 768, 1000, 1024, 4032)
SIZES = [
    *((width, height) for width in _SIDES for height in _SIDES),
    *((4096, 4096), (4097, 4096), (5000, 3400), (8160, 6120), (3024, 4032), (12000, 9000), (20000, 100), (60, 11999)),
    *((201, 1), (200, 1), (1, 4000), (1, 300), (280, 1), (281, 1), (1, 281), (560, 2), (561, 2), (100, 20100)),
]
"""Width and height of pictures."""


class Recorded(TypedDict):
    rows: dict[str, dict[str, str]]
    """Family -> picture and limit -> digest of its rows as float32."""
    sizes: dict[str, list[list[int] | None]]
    """Family -> for each of SIZES width and height after resizing, None if it is refused."""


def recorded() -> Recorded:
    found: Recorded = json.loads(PATH.read_text())
    return found
