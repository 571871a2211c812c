"""Pictures of every form and mode become the right pixels."""

from collections.abc import Callable
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from runner.media import picture
from runner.media.geometry import Alpha, Pixels
from runner.media.header import PictureHeader, read_picture_header
from tests.unit.media.pictures import FORMS, decode, encoded, in_form, pattern, seen, smooth

NAMES = {"jpeg-progressive": "JPEG", "webp-lossless": "WebP", "webp": "WebP"}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read(form: str) -> None:
    image = smooth(70, 40)
    data = in_form(form, image)
    assert read_picture_header(data)._replace(kept=()) == PictureHeader(NAMES.get(form, form.upper()), 70, 40, 1)
    found = seen(data)
    assert found.shape == (40, 70, 3)
    assert found.dtype == np.uint8
    assert found.flags.c_contiguous
    difference = np.abs(found.astype(int) - np.asarray(image)).max()
    assert difference <= (0 if FORMS[form].lossless else 24)


@pytest.mark.parametrize("form", FORMS)
def test_bytes_after_the_picture_are_ignored(form: str) -> None:
    data = in_form(form, smooth(20, 10))
    assert np.array_equal(seen(data + b"more" * 50), seen(data))


def test_resizing_is_pillows_bicubic() -> None:
    image = Image.fromarray(pattern(100, 60))
    data = encoded(image)
    for size in ((32, 96), (200, 32), (100, 60)):
        expected = np.asarray(image.resize(size, Image.Resampling.BICUBIC))
        assert np.array_equal(decode(data, read_picture_header(data), *size), expected)


def test_grey_of_sixteen_bits_keeps_its_upper_eight() -> None:
    """Pillow's own conversion would clip this ramp to white."""
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    data = encoded(Image.fromarray(ramp))
    assert Image.open(BytesIO(data)).mode == "I;16"
    found = seen(data)
    assert found.mean() == 127.5
    assert np.array_equal(found, np.repeat((ramp >> 8).astype(np.uint8)[..., None], 3, axis=2))


@pytest.mark.parametrize("mode", ["I", "I;16", "I;16L", "I;16B", "I;16N"])
def test_grey_of_more_bits_is_clipped_to_sixteen(mode: str) -> None:
    """Of every mode in which Pillow keeps it, of which files of today's formats make one."""
    levels = np.arange(-(1 << 15), 3 << 15).reshape(512, 256) if mode == "I" else np.arange(1 << 16).reshape(256, 256)
    if mode == "I":
        levels[0, :2] = -(1 << 31), (1 << 31) - 1
    order = "<i4" if mode == "I" else ">u2" if mode == "I;16B" else "<u2"
    image = Image.frombytes(mode, levels.shape[::-1], levels.astype(order).tobytes())
    plain = picture._plain(image, "drop")
    assert plain.mode == "L"
    assert np.array_equal(np.asarray(plain), np.clip(levels, 0, 0xFFFF) >> 8)


def rgb(*rows: list[tuple[int, int, int]]) -> list[list[list[int]]]:
    return [[list(pixel) for pixel in row] for row in rows]


def test_colours_under_transparent_pixels_are_seen() -> None:
    image = Image.fromarray(np.array([[[10, 20, 30, 0], [40, 50, 60, 128]]], np.uint8), "RGBA")
    for form in ("PNG", "WEBP"):
        data = encoded(image, form, **({"lossless": True, "exact": True} if form == "WEBP" else {}))
        assert seen(data).tolist() == rgb([(10, 20, 30), (40, 50, 60)])


@pytest.mark.parametrize(("form", "options"), [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {}), ("AVIF", {})])
def test_of_moving_pictures_the_first_is_seen(form: str, options: dict[str, object]) -> None:
    frames = [Image.new("RGB", (24, 16), colour) for colour in ((250, 0, 0), (0, 250, 0), (0, 0, 250))]
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:], duration=100, **options)
    assert np.abs(seen(data).astype(int) - [250, 0, 0]).max() <= 4


TURNED: dict[int, Callable[[Pixels], Pixels]] = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.transpose(1, 0, 2),
    6: lambda stored: stored.transpose(1, 0, 2)[:, ::-1],
    7: lambda stored: stored.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda stored: stored.transpose(1, 0, 2)[::-1],
}
"""Orientation -> the picture as it is seen, of the one that is stored (EXIF 2.32, Orientation)."""


def with_orientation(image: Image.Image, form: str, orientation: int, **options: object) -> bytes:
    exif = Image.Exif()
    exif[0x010F] = "a maker, so that there are several entries"
    exif[0x0112] = orientation
    return encoded(image, form, exif=exif, **options)


@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize(("form", "options"), [("PNG", {}), ("WEBP", {"lossless": True}), ("JPEG", {"quality": 95})])
def test_cameras_may_be_held_in_any_way(form: str, options: dict[str, object], orientation: int) -> None:
    image = smooth(40, 24)
    data = with_orientation(image, form, orientation, **options)
    header = read_picture_header(data)
    assert header.orientation == orientation
    assert (header.width, header.height) == ((24, 40) if orientation >= 5 else (40, 24))
    check_near(seen(data), TURNED[orientation](np.asarray(image)), 24 if form == "JPEG" else 0)


@pytest.mark.parametrize("orientation", TURNED)
def test_avif_has_its_own_way_to_say_so(orientation: int) -> None:
    image = smooth(40, 24)
    data = with_orientation(image, "AVIF", orientation, quality=95, speed=10)
    check_near(seen(data), TURNED[orientation](np.asarray(image)), 24)


def check_near(found: Pixels, expected: Pixels, most: int) -> None:
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).max() <= most


@pytest.mark.parametrize("orientation", [0, 9])
def test_an_orientation_that_does_not_exist_is_none(orientation: int) -> None:
    assert read_picture_header(with_orientation(smooth(40, 24), "PNG", orientation)).orientation == 1


HALF = np.array([[[200, 100, 50, 255], [0, 0, 0, 0]], [[200, 100, 50, 255], [80, 80, 80, 128]]], np.uint8)


def test_transparency_as_a_weight() -> None:
    """A transparent pixel has no say in the colour of the result; where all are transparent, it is black."""
    data = encoded(Image.fromarray(HALF[:1], "RGBA"))
    small = decode(data, read_picture_header(data), 1, 1, "weigh")
    assert np.abs(small.astype(int) - [[[200, 100, 50]]]).max() <= 1
    assert decode(data, read_picture_header(data), 1, 1).tolist() == [[[100, 50, 25]]]
    assert seen(data, "weigh").tolist() == rgb([(200, 100, 50), (0, 0, 0)])


def test_transparency_on_a_black_ground() -> None:
    data = encoded(Image.fromarray(HALF, "RGBA"))
    assert seen(data, "black").tolist() == rgb([(200, 100, 50), (0, 0, 0)], [(200, 100, 50), (40, 40, 40)])


def test_transparency_of_palettes_and_grey_counts_too() -> None:
    image = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    image.putpalette([10, 20, 30, 40, 50, 60])
    alphas: tuple[Alpha, ...] = ("weigh", "black")
    for alpha in alphas:
        assert seen(encoded(image, transparency=1), alpha).tolist() == rgb([(10, 20, 30), (0, 0, 0)])
    grey = Image.fromarray(np.array([[[100, 255], [100, 0]]], np.uint8), "LA")
    assert seen(encoded(grey), "black").tolist() == rgb([(100, 100, 100), (0, 0, 0)])
