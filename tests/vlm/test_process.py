"""The process with mlx-vlm's processor: what it makes, what it refuses, and how it ends."""

from collections.abc import Iterator
from functools import partial
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from runner.errors import MediaError, ModelError
from runner.media.header import Header, read_header
from runner.media.vlm.process import MOST_PIXELS, Preparer, Setup, _order, prepare_bytes, resized
from tests.vlm.pictures import RED
from tests.vlm.seeing import loaded

PACKAGE = "smolvlm"
STAYS = partial(bool, False)


@pytest.fixture(scope="module")
def preparer() -> Iterator[Preparer]:
    started = Preparer(loaded(PACKAGE).setup)
    started.start()
    yield started
    started._stop()


def test_it_makes_what_the_processor_makes(preparer: Preparer) -> None:
    header = read_header(RED)
    here = loaded(PACKAGE).processor.prepared(Image.open(BytesIO(RED)).convert("RGB"))
    arrays = preparer.prepare(RED, header, STAYS)
    assert arrays.keys() == here[1].keys()
    for name, array in here[1].items():
        assert np.array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype
    measured = preparer.measure(header.width, header.height, STAYS)
    assert measured.ids == here[0]


def test_a_damaged_picture_is_refused_and_the_next_one_is_not(preparer: Preparer) -> None:
    header = read_header(RED)
    with pytest.raises(MediaError, match=r"^decode image: damaged PNG"):
        preparer.prepare(RED[: len(RED) // 2], header, STAYS)
    assert preparer.prepare(RED, header, STAYS)


def test_it_is_ended_for_a_client_that_left_and_begins_anew(preparer: Preparer) -> None:
    with pytest.raises(MediaError, match="the client has left"):
        preparer._answers(_order(Header("PNG", 64, 64, 1), 0, 0), [], lambda: True, "decode image", "picture")
    assert preparer.prepare(RED, read_header(RED), STAYS)


def test_files_without_a_processor_say_so() -> None:
    setup = Setup(PACKAGE, "<image>", {"config.json": b'{"model_type": "smolvlm"}'})
    with pytest.raises(ModelError, match=r"^mlx-vlm's processor cannot be used here: "):
        Preparer(setup).start()


def test_a_picture_of_many_megapixels_is_made_smaller_first() -> None:
    width, height = resized(10_000, 10_000)
    assert width * height <= MOST_PIXELS
    assert resized(640, 480) == (640, 480)
    assert resized(100_000_000, 1) == (40_960_000, 1)
    large, small = (prepare_bytes(Header("JPEG", side, side, 1), 0) for side in (10_000, 4096))
    assert large - small == (10_000**2 - 4096**2) * 12, "beyond that, only decoding takes more"
