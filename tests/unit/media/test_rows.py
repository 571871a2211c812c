"""The rows of each family: those of transformers' processors bit for bit, and their layouts."""

import hashlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from runner.media.families import Gemma4, Gemma4Unified, Glimmer, NemotronH, PictureFamily, Qwen35
from runner.media.geometry import CHANNEL_Y_X, Pixels, cut
from runner.media.header import read_picture_header
from tests.unit.media.pictures import decode, encoded, pattern
from tests.unit.media.recorded import ROW_CASES, recorded

Values = npt.NDArray[np.float32]
CASES = [(family, *case) for family, cases in ROW_CASES.items() for case in cases]


def qwen_values(rows: Pixels) -> Values:
    """As the processor does it: rescaled in float64, normalized in float32, each channel twice for two moments."""
    values = ((rows * (1 / 255)).astype(np.float32) - np.float32(0.5)) / np.float32(0.5)
    return np.repeat(values.reshape(len(rows), 3, 1, -1), 2, axis=2).reshape(len(rows), -1)


def gemma_values(rows: Pixels) -> Values:
    return (rows * (1 / 255)).astype(np.float32)


FAMILIES: dict[str, tuple[Callable[[int], PictureFamily], Callable[[Pixels], Values]]] = {
    "qwen3_5": (lambda limit: Qwen35(max_pixels=limit), qwen_values),
    "gemma4": (lambda limit: Gemma4(budget=limit), gemma_values),
}


@pytest.mark.parametrize(("name", "width", "height", "limit"), CASES)
def test_rows_are_those_of_transformers_to_the_bit(name: str, width: int, height: int, limit: int) -> None:
    make, values = FAMILIES[name]
    family = make(limit)
    data = encoded(Image.fromarray(pattern(width, height)), "BMP")
    geometry = family.geometry(width, height)
    pixels = decode(data, read_picture_header(data), geometry.width, geometry.height, family.alpha)
    rows = family.patches(pixels, geometry)
    assert len(rows) == geometry.rows * geometry.columns
    digest = hashlib.sha256(values(rows).tobytes()).hexdigest()[:32]
    assert digest == recorded()["rows"][name][f"{width}x{height} {limit}"]


def numbered(width: int, height: int) -> npt.NDArray[np.int32]:
    """A picture whose every value is its own number: (y * width + x) * 3 + channel."""
    return np.arange(width * height * 3, dtype=np.int32).reshape(height, width, 3)


@pytest.mark.parametrize("family", [Glimmer(patch=2, downsample=3), NemotronH(patch=2, downsample=3)])
def test_rows_of_glimmer_and_nemotron_go_patch_by_patch(family: PictureFamily) -> None:
    patch, width, height = 2, 24, 12
    expected = [
        [(top + y, left + x, channel) for channel in range(3) for y in range(patch) for x in range(patch)]
        for top in range(0, height, patch)
        for left in range(0, width, patch)
    ]
    check(family, expected, width, height)


@pytest.mark.parametrize(("family", "patch"), [(Gemma4(patch=2, pool=3), 2), (Gemma4Unified(patch=2, pool=3), 6)])
def test_rows_of_gemma_have_the_colours_of_a_pixel_together(family: PictureFamily, patch: int) -> None:
    width, height = 12, 18
    expected = [
        [(top + y, left + x, channel) for y in range(patch) for x in range(patch) for channel in range(3)]
        for top in range(0, height, patch)
        for left in range(0, width, patch)
    ]
    check(family, expected, width, height)


def check(family: PictureFamily, expected: list[list[tuple[int, int, int]]], width: int, height: int) -> None:
    """`expected` has for each value of each row the y, x and channel of the picture that it comes from."""
    geometry = replace(family, **budget_of(family)).geometry(width, height)  # type: ignore[arg-type]
    assert (geometry.width, geometry.height) == (width, height), "chosen so that nothing is resized"
    found = family.patches(numbered(width, height), geometry)  # type: ignore[arg-type]  # wider numbers than pixels
    assert found.tolist() == [[(y * width + x) * 3 + channel for y, x, channel in row] for row in expected]
    assert geometry.rows * geometry.columns == len(expected)


def budget_of(family: PictureFamily) -> dict[str, object]:
    """Limits under which a tiny picture stays as it is."""
    if isinstance(family, Qwen35):
        return {"min_pixels": 1}
    if isinstance(family, NemotronH):
        return {"min_patches": 1}
    return {"budget": 6} if isinstance(family, Gemma4) else {}


def test_rows_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"want sides of 32 pixels and 3 channels, found \(48, 32, 3\)"):
        cut(np.zeros((48, 32, 3), np.uint8), 16, CHANNEL_Y_X, 2)
