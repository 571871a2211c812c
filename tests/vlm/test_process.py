"""The process with mlx-vlm's processor: what it makes, what it refuses, and how it ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from runner.errors import MediaError, ModelError
from runner.media.header import PictureHeader, read_picture_header
from runner.vlm.process import MOST_PIXELS, Preparer, Setup, _order, prepare_bytes, resized
from runner.vlm.sight import named_arrays
from tests.vlm.pictures import BLUE, RED
from tests.vlm.seeing import loaded

PACKAGE = "smolvlm"
STAYS = partial(bool, False)


@pytest.fixture(scope="module")
def preparer() -> Iterator[Preparer]:
    with started(PACKAGE) as preparer:
        yield preparer


@contextmanager
def started(package: str) -> Iterator[Preparer]:
    """The process of a package's processor."""
    preparer = Preparer(loaded(package).setup)
    preparer.start()
    yield preparer
    preparer._stop()


@pytest.mark.parametrize(
    "package",
    [
        PACKAGE,
        "kimi_vl",  # numbers
        "minicpmo",  # lists of arrays, and arrays that are empty
        "deepseekocr",  # bfloat16
        "fastvlm",  # one token
    ],
)
def test_it_makes_what_the_processor_makes(package: str) -> None:
    header = read_picture_header(RED)
    here = loaded(package).processor.prepared(Image.open(BytesIO(RED)).convert("RGB"))
    with started(package) as preparer:
        arrays = preparer.prepare(RED, header, STAYS)
        measured = preparer.measure(header.width, header.height, STAYS)
    assert arrays.keys() == here[1].keys()
    for name, array in here[1].items():
        assert np.array_equal(arrays[name], array)
        assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)
    assert measured.ids == here[0]


def test_numbers_in_bfloat16_cross_as_their_bits() -> None:
    processor, shown = loaded("deepseekocr").processor, Image.open(BytesIO(RED)).convert("RGB")
    arrays = processor.prepared(shown)[1]
    found = named_arrays({name: mx.array(each) for name, each in arrays.items()})["pixel_values"][1]
    assert found.dtype == mx.bfloat16
    assert mx.array_equal(found, processor._processor(text=["<image> "], images=[shown])["images"][1])


def test_the_crops_of_deepseeks_pictures_end_with_a_row_of_zeros() -> None:
    """mlx-vlm reads a row for each tile, until one is zero."""
    for shown in ([RED], [RED, BLUE]):
        pictures = [Image.open(BytesIO(each)).convert("RGB") for each in shown]
        arrays = loaded("deepseek_vl_v2").processor.together(pictures, "<image>" * len(shown))
        crops, tiles = arrays["images_spatial_crop"][0], arrays["pixel_values"].shape[1]
        assert len(crops) == tiles
        assert crops.any(axis=1).tolist() == [True] * len(shown) + [False] * (tiles - len(shown))


def test_a_damaged_picture_is_refused_and_the_next_one_is_not(preparer: Preparer) -> None:
    header = read_picture_header(RED)
    with pytest.raises(MediaError, match=r"^decode image: damaged PNG"):
        preparer.prepare(RED[: len(RED) // 2], header, STAYS)
    assert preparer.prepare(RED, header, STAYS)


def test_it_is_ended_for_a_client_that_left_and_begins_anew(preparer: Preparer) -> None:
    with pytest.raises(MediaError, match="the client has left"):
        preparer._answers(_order(PictureHeader("PNG", 64, 64, 1), 0, 0), [], lambda: True, "decode image", "picture")
    assert preparer.prepare(RED, read_picture_header(RED), STAYS)


def test_files_without_a_processor_say_so() -> None:
    setup = Setup(PACKAGE, "<image>", {"config.json": b'{"model_type": "smolvlm"}'})
    with pytest.raises(ModelError, match=r"^mlx-vlm's processor cannot be used here: "):
        Preparer(setup).start()


def test_a_picture_of_many_megapixels_is_made_smaller_first() -> None:
    width, height = resized(10_000, 10_000)
    assert width * height <= MOST_PIXELS
    assert resized(640, 480) == (640, 480)
    assert resized(100_000_000, 1) == (40_960_000, 1)
    large, small = (prepare_bytes(PictureHeader("JPEG", side, side, 1), 0) for side in (10_000, 4096))
    assert large - small == (10_000**2 - 4096**2) * 12, "beyond that, only decoding takes more"
