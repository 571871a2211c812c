"""Shapes determine the packing of a tensor uniquely, once the input width is known.

See docs/internals/store.md, 2.4.
"""

import itertools

import pytest

from runner.model.packing import AFFINE_BITS, AFFINE_GROUPS, FLOAT_MODES, Packing, find_packing

WIDTHS = (128, 256, 384, 2048, 5120)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_legal_packing_is_recognized(width: int) -> None:
    for bits, group_size in itertools.product(AFFINE_BITS, AFFINE_GROUPS):
        found = find_packing(width, width * bits // 32, width // group_size, byte_scales=False)
        assert found == Packing(bits, group_size, "affine")
    for (bits, group_size), mode in FLOAT_MODES.items():
        found = find_packing(width, width * bits // 32, width // group_size, byte_scales=True)
        assert found == Packing(bits, group_size, mode)


@pytest.mark.parametrize("width", WIDTHS)
def test_packed_words_and_scales_never_have_one_shape(width: int) -> None:
    """Loading distinguishes packed results of `sanitize` from dense ones by this."""
    for bits, group_size in [*itertools.product(AFFINE_BITS, AFFINE_GROUPS), *FLOAT_MODES]:
        assert width * bits // 32 != width // group_size


@pytest.mark.parametrize(
    ("width", "words", "groups", "byte_scales"),
    [
        (64, 8, 0, False),
        (64, 0, 1, False),
        (0, 8, 1, False),
        (64, 5, 1, False),
        (64, 14, 1, False),
        (64, 8, 3, False),
        (64, 8, 4, False),
        (1040, 260, 32, False),
        (64, 8, 1, True),
        (64, 16, 4, True),
    ],
)
def test_what_no_quantizer_makes_is_none(width: int, words: int, groups: int, byte_scales: bool) -> None:
    assert find_packing(width, words, groups, byte_scales=byte_scales) is None
