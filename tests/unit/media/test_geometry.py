"""The size of a picture in each family: against transformers, by properties, and in words."""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.errors import MediaError
from runner.media.families import Gemma4, Gemma4Unified, Glimmer, NemotronH, PictureFamily, Qwen35
from runner.media.geometry import Geometry
from tests.unit.media.recorded import SIZES, recorded

FAMILIES: Mapping[str, PictureFamily] = {
    family.name: family for family in (Qwen35(), Glimmer(), Gemma4(), Gemma4Unified(), NemotronH())
}
SIDES = {"qwen3_5": 32, "glimmer": 28, "gemma4": 48, "gemma4_unified": 48, "nemotron_h": 32}
"""Family -> pixels of the side of a soft token."""
PATCHES = {"qwen3_5": 16, "glimmer": 14, "gemma4": 16, "gemma4_unified": 48, "nemotron_h": 16}
MOST_TOKENS = {"qwen3_5": 16_384, "glimmer": 4096, "gemma4": 280, "gemma4_unified": 280, "nemotron_h": 3328}


def geometry_or_none(family: PictureFamily, width: int, height: int) -> Geometry | None:
    try:
        return family.geometry(width, height)
    except MediaError:
        return None


def size_or_none(family: PictureFamily, width: int, height: int) -> list[int] | None:
    geometry = geometry_or_none(family, width, height)
    return geometry and [geometry.width, geometry.height]


@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_are_those_of_transformers(name: str) -> None:
    """But for Glimmer's exact ties, which transformers leaves to the order of a set, and slivers beyond the budget."""
    differ = [
        (size, found, wanted)
        for size, wanted in zip(SIZES, recorded()["sizes"][name], strict=True)
        if (found := size_or_none(FAMILIES[name], *size)) != wanted
    ]
    if name == "glimmer":
        differ = [each for each in differ if not is_tie(*each)]
    assert differ == []


def is_tie(size: tuple[int, int], found: list[int] | None, wanted: list[int] | None) -> bool:
    if found is None or wanted is None:
        return False
    errors = {abs(height / width - size[1] / size[0]) for width, height in (found, wanted)}
    return len(errors) == 1 and found[0] * found[1] > wanted[0] * wanted[1]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40)
@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_the_parts_of_a_geometry_fit_together(name: str, width: int, height: int) -> None:
    geometry = geometry_or_none(FAMILIES[name], width, height)
    if geometry is None:
        return
    side, patch = SIDES[name], PATCHES[name]
    assert geometry.width % side == geometry.height % side == 0
    assert (geometry.columns * patch, geometry.rows * patch) == (geometry.width, geometry.height)
    assert (geometry.token_columns * side, geometry.token_rows * side) == (geometry.width, geometry.height)
    assert geometry.tokens == geometry.token_rows * geometry.token_columns
    assert 0 < geometry.tokens <= MOST_TOKENS[name]


@pytest.mark.parametrize(
    ("name", "width", "height", "text"),
    [
        ("qwen3_5", 1, 4000, "image aspect ratio 4000 exceeds 200"),
        ("qwen3_5", 20_050, 100, "image aspect ratio 200 exceeds 200"),
        ("qwen3_5", 403, 2, "image aspect ratio 202 exceeds 200"),
        ("gemma4", 1, 100_000_000, ""),
        ("gemma4", 70, 100_000_000, ""),
        ("glimmer", 100_000_000, 1, "image 100000000x1 exceeds the patch budget after resize"),
        ("nemotron_h", 1, 100_000_000, "image 1x100000000 exceeds the patch budget after resize"),
    ],
)
def test_slivers_are_refused_in_words_or_fit_the_budget(name: str, width: int, height: int, text: str) -> None:
    if text:
        with pytest.raises(MediaError) as refusal:
            FAMILIES[name].geometry(width, height)
        assert str(refusal.value) == text
        assert refusal.value.status == 400
    else:
        assert FAMILIES[name].geometry(width, height).tokens == MOST_TOKENS[name]
