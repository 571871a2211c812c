"""The walk over what comes before the pixels: bounded in parts, bytes and time, whatever a file is made of."""

import random
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from runner.errors import MediaError
from runner.media.header import MOST_PARTS, read_picture_header
from tests.lib.lines import lines_of
from tests.unit.media.pictures import encoded, in_form, pattern, png_chunk, png_of_size, seen, smooth

MANY = 200_000
MOST_LINES, MOST_BYTES = 80_000, 1 << 20
"""The lines of code that reading a header may run, and the memory that it may take."""
PLAIN = {form: in_form(form, smooth(40, 24)) for form in ("jpeg", "png", "gif", "webp", "avif", "bmp")}


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def riff(chunks: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WEBP" + chunks


def riff_chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", len(content) + 8, kind) + content


def jpeg_with(parts: bytes) -> bytes:
    return PLAIN["jpeg"][:2] + parts + PLAIN["jpeg"][2:]


def png_with(parts: bytes) -> bytes:
    return PLAIN["png"][:33] + parts + PLAIN["png"][33:]


def gif_with(parts: bytes) -> bytes:
    place = 13 + (3 << (PLAIN["gif"][10] & 7) + 1 if PLAIN["gif"][10] & 0x80 else 0)
    return PLAIN["gif"][:place] + parts + PLAIN["gif"][place:]


def webp_with(parts: bytes) -> bytes:
    """A WebP whose EXIF, by its own account, comes after these chunks."""
    canvas = struct.pack("<I", 8) + (39).to_bytes(3, "little") + (23).to_bytes(3, "little")
    return riff(riff_chunk(b"VP8X", canvas) + PLAIN["webp"][12:] + parts)


def avif_with(parts: bytes) -> bytes:
    place = int.from_bytes(PLAIN["avif"][:4])
    return PLAIN["avif"][:place] + parts + PLAIN["avif"][place:]


CROWDS: dict[str, tuple[Callable[[bytes], bytes], list[bytes]]] = {
    "jpeg": (
        jpeg_with,
        [segment(0xE3, b""), segment(0xE1, b"Exif\0\0x"), segment(0xFE, b"c"), b"\xff\xd0", b"\xff\xff"],
    ),
    "jpeg-tables": (jpeg_with, [segment(0xDB, b""), segment(0xC4, b""), segment(0xEE, b"Adobe")]),
    "png": (png_with, [png_chunk(b"abCd", b""), png_chunk(b"tEXt", b"a\0b"), png_chunk(b"tRNS", b"")]),
    "gif": (gif_with, [b"!\xfe\0", b"!\xf9\4\0\0\0\0\0", b"!\xff\1x\1y\0", b"\0"]),
    "gif-blocks": (lambda parts: gif_with(b"!\xfe" + parts + b"\0"), [b"\1x", b"\2xy"]),
    "webp": (webp_with, [riff_chunk(b"abcd", b""), riff_chunk(b"ANMF", b"x")]),
    "avif": (avif_with, [box(b"free", b""), box(b"abcd", b"x")]),
}


def lines_to_read(data: bytes) -> int:
    """Returns the number of lines of Python that a walk runs."""

    def read() -> None:
        with suppress(MediaError):
            read_picture_header(data)

    return lines_of(read)


@pytest.mark.parametrize("form", CROWDS)
def test_a_file_of_many_small_parts_is_refused_at_once(form: str) -> None:
    insert, parts = CROWDS[form]
    chance = random.Random(form)
    crowds = [each * MANY for each in parts] + [b"".join(chance.choices(parts, k=MANY))]
    for crowd in crowds:
        data = insert(crowd)
        assert 0 < lines_to_read(data) < MOST_LINES
        tracemalloc.start()
        with pytest.raises(MediaError, match=r"^decode image: damaged "):
            read_picture_header(data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MOST_BYTES


def avif_of(*boxes: bytes) -> bytes:
    return PLAIN["avif"][: int.from_bytes(PLAIN["avif"][:4])] + b"".join(boxes)


CROWD = 3000  # fewer than may be in a file
TRACK = box(b"trak", box(b"free", b"") * CROWD)
OTHERS_ITEMS = struct.pack(">4xI", CROWD) + struct.pack(">HB", 7, 0) * CROWD
PROPERTIES = box(b"ipco", box(b"free", b"") * CROWD) + box(b"ipma", OTHERS_ITEMS)
NESTS = {
    "tracks": avif_of(box(b"moov", TRACK * 100)),
    "items": avif_of(box(b"meta", bytes(4) + box(b"pitm", struct.pack(">4xH", 1)) + box(b"iprp", PROPERTIES))),
    "blocks": gif_with((b"!\xfe" + b"\1x" * CROWD + b"\0") * 100),
}


@pytest.mark.parametrize("name", NESTS)
def test_parts_within_parts_are_counted_together(name: str) -> None:
    data = NESTS[name]
    assert 0 < lines_to_read(data) < MOST_LINES
    with pytest.raises(MediaError, match=f": more than {MOST_PARTS} parts come before its pixels$"):
        read_picture_header(data)


def test_entries_of_exif_count_too_and_cost_the_orientation_alone() -> None:
    exif = b"MM\0*\0\0\0\x08\xff\xff" + bytes(0xFFFF * 12)
    turned = b"MM\0*\0\0\0\x08\0\1" + struct.pack(">HHIHH", 0x0112, 3, 1, 6, 0)
    for data in (png_with(png_chunk(b"eXIf", exif) * 20), webp_with(riff_chunk(b"EXIF", exif))):
        assert 0 < lines_to_read(data) < MOST_LINES
        assert read_picture_header(data)[1:4] == (40, 24, 1)
    assert read_picture_header(png_with(png_chunk(b"eXIf", exif) + png_chunk(b"eXIf", turned))).orientation == 6


@pytest.mark.parametrize("form", CROWDS)
@pytest.mark.parametrize("seed", range(2))
def test_what_is_between_the_parts_that_matter_changes_nothing(form: str, seed: int) -> None:
    """Files of some hundred parts, of any size, before the pixels: read, or refused as a decoder would."""
    insert, parts = CROWDS[form]
    chance = random.Random(seed)
    harmless = [part for part in parts if b"tRNS" not in part and b"Adobe" not in part and part[:2] != b"\xff\xdb"]
    data = insert(b"".join(chance.choices(harmless, k=chance.randrange(300))))
    header, plain = read_picture_header(data), read_picture_header(PLAIN[form.split("-")[0]])
    assert header._replace(kept=()) == plain._replace(kept=())
    if form not in ("webp", "avif"):  # these refer to places in the file
        assert np.array_equal(seen(data), seen(PLAIN[form.split("-")[0]]))


def test_what_cameras_and_editors_write_is_read() -> None:
    """Large EXIF with a thumbnail, extended XMP, a colour profile in 255 parts, several pictures in one file."""
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x9286] = b"x" * 60_000
    xmp = segment(0xE1, b"http://ns.adobe.com/xmp/extension/\0" + bytes(65_000))
    profile = b"".join(segment(0xE2, b"ICC_PROFILE\0" + bytes([part, 255]) + bytes(65_000)) for part in range(1, 256))
    several = segment(0xE2, b"MPF\0" + bytes(90)) + segment(0xED, b"Photoshop 3.0\0" + bytes(60_000))
    image = smooth(40, 24)
    for form in ({}, {"progressive": True}):
        whole = encoded(image, "JPEG", exif=exif, comment=b"a comment", **form)
        assert (whole[3], len(whole)) > (0xE0, 60_000)
        data = whole[:2] + profile + xmp * 200 + several + whole[2:] + PLAIN["jpeg"]
        header = read_picture_header(data)
        assert header[:4] == ("JPEG", 24, 40, 6)
        assert np.array_equal(seen(data), seen(whole))
        assert sum(map(len, header.pieces(data))) < 5000, "nothing of this reaches the decoder"


ORDERLY = {
    "PNG": (b"\x89PNG\r\n\x1a\n", b"\x89PNG\r\n\x1a\n" + bytes(40), png_of_size(0, 5), png_with(b"\xff" * 12)),
    "JPEG": (b"\xff\xd8\xff", jpeg_with(b"\xff\xd9"), jpeg_with(b"\xff\xe1\0\1"), jpeg_with(b"\xff" + bytes(100_000))),
    "GIF": (b"GIF89a", gif_with(b";"), PLAIN["gif"][:20]),
    "WebP": (riff(b""), riff(b"ICCP" + bytes(20)), PLAIN["webp"][:20] + bytes(20)),
    "BMP": (b"BM", PLAIN["bmp"][:18] + bytes(8) + PLAIN["bmp"][26:]),
    "AVIF": (
        *(PLAIN["avif"][:24], PLAIN["avif"].replace(b"ispe", b"abcd"), PLAIN["avif"].replace(b"pitm", b"abcd")),
        PLAIN["avif"].replace(b"ipma\0\0\0\0\0\0\0", b"ipma\0\0\0\0\x7f\0\0"),
    ),
}


@pytest.mark.parametrize("name", ORDERLY)
def test_what_is_wrong_is_said_in_plain_words(name: str) -> None:
    for data in ORDERLY[name]:
        with pytest.raises(MediaError) as refusal:
            seen(data)
        reason = str(refusal.value).removeprefix(f"decode image: damaged {name}: ")
        assert reason.startswith(("the file ends too early", "its ", "it ", "a segment ", "a box ", "more than ")), (
            reason
        )


def test_no_message_of_a_library_reaches_a_client() -> None:
    """Pixels that are cut off or spoilt, in every format."""
    chance = random.Random(3)
    for form, plain in PLAIN.items():
        for _ in range(12):
            data = bytearray(plain[: chance.randrange(len(plain) // 2, len(plain))])
            for _ in range(chance.choice((0, 3, 30))):
                data[chance.randrange(12, len(data))] = chance.randrange(256)
            try:
                seen(bytes(data))
            except MediaError as refusal:
                text = str(refusal)
                assert not any(word in text for word in ("unpack", "index", "NoneType", "b'", "buffer", "0x7")), text
                assert text.startswith("decode image: "), form


@pytest.mark.parametrize("bits", [12, 16])
def test_a_jpeg_of_more_bits_is_refused_with_advice(bits: int) -> None:
    data = bytearray(PLAIN["jpeg"])
    data[data.index(b"\xff\xc0") + 4] = bits
    with pytest.raises(MediaError, match=f"^decode image: a JPEG of {bits} bits is not supported: convert the image"):
        read_picture_header(bytes(data))


def test_a_jpeg_of_many_scans_is_refused() -> None:
    """Each of them, of a few bytes, makes the decoder go over all pixels."""
    data = in_form("jpeg-progressive", smooth(40, 24))
    place = data.rindex(b"\xff\xda")
    head, scan, end = data[:place], data[place:-2], data[-2:]
    assert np.array_equal(seen(data + scan * 150), seen(data)), "what is behind the end does not count"
    end_inside = {"table": segment(0xDB, b"\3\xff\xd9" + b"\1" * 62), "comment": segment(0xFE, b"\xff\xd9")}
    heads = [head, head[:2] + end_inside["table"] + head[2:], head + end_inside["comment"]]
    for each in heads:
        with pytest.raises(MediaError, match=r"^decode image: damaged JPEG: it has more than 100 scans$"):
            seen(each + scan * 101 + end)
    with pytest.raises(MediaError, match=r"^decode image: damaged JPEG: it has more than 4096 parts$"):
        seen(head + end_inside["comment"] * 5000 + scan + end)
    assert np.array_equal(seen(head + segment(0xFE, b"\xff\xda" * 101) + scan + end), seen(data))


def test_a_png_of_twenty_megabytes_has_thousands_of_chunks_of_pixels() -> None:
    plain = encoded(Image.fromarray(pattern(200, 100)))
    content = plain[plain.index(b"IDAT") + 4 : plain.index(b"IEND") - 8]
    chunks = [png_chunk(b"IDAT", content[at : at + 2]) for at in range(0, len(content), 2)]
    assert len(chunks) > MOST_PARTS
    text = png_chunk(b"tEXt", b"key\0" + bytes(8000)) * 100
    data = plain[:33] + text + b"".join(chunks) + plain[-12:]
    assert np.array_equal(seen(data), seen(plain))


def test_a_gif_may_have_a_profile_and_xmp_before_its_first_frame() -> None:
    blocks = b"".join(bytes([255]) + bytes(255) for _ in range(2000))
    data = gif_with(b"!\xff\x0bICCRGBG1012" + blocks + b"\0" + b"!\xfe\5hello\0")
    assert np.array_equal(seen(data), seen(PLAIN["gif"]))
