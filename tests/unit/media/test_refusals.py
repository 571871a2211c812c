"""Pictures that are refused: what the texts say, before how much work."""

import subprocess
import sys
import tracemalloc

import pytest
from PIL import Image

from runner.errors import MediaError, RequestError
from runner.media.header import AUDIO, IMAGE, media_kind, read_picture_header
from tests import ROOT
from tests.unit.media.pictures import FORMS, decode, encoded, in_form, pattern, png_of_size, seen, smooth

TOO_LARGE = r"decode image: \d+ x \d+ pixels exceed the limit of 100 megapixels: send a smaller picture"
FOREIGN = {
    "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100),
    "JPEG XL": b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(100),
    "JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(100),
    "TIFF": encoded(Image.new("RGB", (4, 4)), "TIFF"),
    "EPS": encoded(Image.new("RGB", (4, 4)), "EPS"),
    "PDF": encoded(Image.new("RGB", (4, 4)), "PDF"),
    "ICO": encoded(Image.new("RGB", (16, 16)), "ICO"),
    "PSD": b"8BPS\0\1" + bytes(100),
    "SVG": b'\xef\xbb\xbf <?xml version="1.0"?>\n<!-- a --> <SVG xmlns="http://www.w3.org/2000/svg"></SVG>',
}


@pytest.mark.parametrize("name", FOREIGN)
def test_known_formats_that_are_not_served_come_with_advice(name: str) -> None:
    text = f"^decode image: {name} is not supported: convert the image to JPEG or PNG$"
    with pytest.raises(MediaError, match=text) as refusal:
        read_picture_header(FOREIGN[name])
    assert isinstance(refusal.value, RequestError)
    assert refusal.value.status == 400
    assert media_kind(FOREIGN[name]) == IMAGE


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "decode image: no data"),
        (b"hello", "decode image: unknown format: want PNG, JPEG, GIF, WebP, BMP or AVIF"),
        (b"RIFF\0\0\0\0WAVEfmt ", "decode image: unknown format: want PNG, JPEG, GIF, WebP, BMP or AVIF"),
        (b"\0\0\0\x10ftypavif\0\0\0\0", "decode image: damaged AVIF: "),
    ],
)
def test_a_refusal_names_the_format_and_what_would_be_read(data: bytes, text: str) -> None:
    with pytest.raises(MediaError) as refusal:
        read_picture_header(data)
    assert str(refusal.value).startswith(text)
    assert "\n" not in str(refusal.value)
    assert "0x" not in str(refusal.value), "no address of an object"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sixteenth", range(0, 16, 3))
def test_a_picture_that_was_cut_off_is_refused(form: str, sixteenth: int) -> None:
    """Nothing is made up for pixels that are missing."""
    data = in_form(form, Image.fromarray(pattern(64, 48)))
    with pytest.raises(MediaError, match=r"^decode image: "):
        read_and_decode(data[: len(data) * sixteenth // 16])


def read_and_decode(data: bytes) -> None:
    decode(data, read_picture_header(data), 32, 32)


def bombs() -> dict[str, bytes]:
    """Small files that claim more than 100 megapixels."""
    size = (50_000).to_bytes(2, "little") * 2
    jpeg, gif, bmp, webp = (bytearray(in_form(form, smooth(16, 16))) for form in ("jpeg", "gif", "bmp", "webp"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = (50_000).to_bytes(2, "big") * 2
    gif[6:10] = size
    bmp[18:26] = (50_000).to_bytes(4, "little") * 2
    canvas = b"VP8X" + (10).to_bytes(4, "little") + bytes(4) + (12_000).to_bytes(3, "little") * 2
    wide = b"RIFF" + (len(webp) + len(canvas) - 8).to_bytes(4, "little") + b"WEBP" + canvas + webp[12:]
    return {"png": png_of_size(50_000, 50_000), "jpeg": bytes(jpeg), "gif": bytes(gif), "bmp": bytes(bmp), "webp": wide}


@pytest.mark.parametrize("form", bombs())
def test_a_bomb_is_refused_by_its_header(form: str) -> None:
    data = bombs()[form]
    assert len(data) < 5000
    tracemalloc.start()
    with pytest.raises(MediaError, match=f"^{TOO_LARGE}$"):
        read_picture_header(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_the_limit_is_a_hundred_megapixels(recwarn: pytest.WarningsRecorder) -> None:
    assert read_picture_header(png_of_size(10_000, 10_000)).width == 10_000
    with pytest.raises(MediaError, match=r"^decode image: 10001 x 10000 pixels exceed the limit of 100 megapixels"):
        read_picture_header(png_of_size(10_001, 10_000))


def test_text_that_inflates_is_not_looked_at() -> None:
    """A PNG can hold packed text, which decoders unpack with the header."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("key", "x" * 5_000_000, zip=True)
    data = encoded(Image.new("RGB", (4, 4)), pnginfo=info)
    assert len(data) < 100_000
    assert sum(map(len, read_picture_header(data).pieces(data))) < 200
    assert seen(data).shape == (4, 4, 3)


def test_want_of_memory_is_not_the_pictures_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Image.Image) -> None:
        raise MemoryError

    data = encoded(smooth(8, 8))
    header = read_picture_header(data)
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", full)
    with pytest.raises(MemoryError):
        decode(data, header, 8, 8)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")  # outside of pytest the module does that itself: see below
def test_damaged_exif_costs_the_orientation_and_not_the_picture() -> None:
    good = Image.Exif()
    good[0x0112] = 6
    whole = good.tobytes()
    for end in range(len(whole)):
        data = encoded(smooth(40, 24), "JPEG", exif=whole[:end])
        assert read_picture_header(data).orientation in (1, 6)
        read_and_decode(data)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        *((in_form(form, smooth(16, 16)), IMAGE) for form in FORMS),
        (b"RIFF\0\0\0\0WAVEfmt ", AUDIO),
        (b"\xff\xfb\x90\x64", AUDIO),
        (b"RIFF\0\0\0\0AVI ", ""),
        (b"hello", ""),
        (b"", ""),
    ],
)
def test_kinds_by_the_first_bytes(data: bytes, kind: str) -> None:
    assert media_kind(data) == kind


DATA = {form: in_form(form, smooth(200, 120)) for form in FORMS}


def test_only_the_process_that_decodes_imports_pillow() -> None:
    """The runner's own reads headers, and has pictures decoded, without it; and nothing is written, whatever Pillow
    thinks of a file."""
    program = """
import pkgutil, sys, importlib
import runner.media
for module in pkgutil.walk_packages(runner.media.__path__, "runner.media."):
    if module.name not in ("runner.media.picture", "runner.media.sound"):
        importlib.import_module(module.name)
from runner.media.decode_process import DecodeProcess
from runner.media.geometry import grid
from runner.media.header import read_picture_header
process = DecodeProcess()
for data in map(bytes.fromhex, sys.stdin.read().split()):
    pixels = process.decode_picture(data, read_picture_header(data), grid(32, 32, 16, 2), "drop", bool)
    assert len(pixels) == 32 * 32 * 3
assert not {"numpy", "PIL"} & set(sys.modules)
"""
    exif = Image.Exif()
    exif[0x0112] = 6
    damaged = encoded(smooth(40, 24), "JPEG", exif=exif.tobytes()[:-5])
    data = " ".join(each.hex() for each in (*DATA.values(), damaged))
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, input=data, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
