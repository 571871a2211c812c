"""A process that reads damaged pictures: `python -m tests.unit.media.fuzzing FORM COUNT SEED`.

Its memory is limited. It ends with status 0 if each picture was read or refused with a MediaError.
"""

import random
import resource
import sys
import zlib
from collections.abc import Iterator

from PIL import Image

from runner.errors import MediaError
from runner.media.families import Qwen35
from runner.media.header import read_picture_header
from tests.unit.media.pictures import decode, in_form, pattern, smooth

MEMORY_BYTES = 3 << 30
"""Of address space. 100 megapixels, decoded and converted, need 0.8 GB; libraries reserve some more."""


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The bytes after one to eight accidents, most of them near the beginning, where headers are."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        place = int(len(found) * chance.random() ** chance.choice((1, 3)))
        match chance.randrange(5):
            case 0:
                found[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del found[place : place + chance.randrange(1, 40)]
            case 2:
                found[place:place] = chance.randbytes(chance.randrange(1, 40))
            case 3:
                found[place : place + 4] = chance.choice((b"\xff\xff\xff\xff", bytes(4), b"\x7f\xff\xff\xff"))
            case _:
                if found:
                    found[place % len(found)] ^= 1 << chance.randrange(8)
    return bytes(found)


def with_right_sums(data: bytes) -> bytes:
    """The bytes of a PNG whose checksums are right: otherwise nearly all damage would be noticed before it matters."""
    found, place = bytearray(data), 8
    while place + 12 <= len(found):
        end = place + 8 + int.from_bytes(found[place : place + 4])
        found[end : end + 4] = zlib.crc32(found[place + 4 : end]).to_bytes(4)[: max(0, len(found) - end)]
        place = end + 4
    return bytes(found)


def pictures(form: str) -> list[bytes]:
    return [
        in_form(form, smooth(40, 24)),
        in_form(form, Image.fromarray(pattern(33, 17))),
        in_form(form, smooth(16, 16, "L" if form.startswith("jpeg") else "RGBA" if form != "bmp" else "P")),
    ]


def cases(form: str, count: int, chance: random.Random) -> Iterator[bytes]:
    originals = pictures(form)
    for data in originals:
        yield from (data[: len(data) * part // 64] for part in range(64))
    for _ in range(count):
        data = damaged(chance.choice(originals), chance)
        yield with_right_sums(data) if form == "png" and chance.random() < 0.7 else data


def main(form: str, count: int, seed: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    seen = read = refused = 0
    for data in cases(form, count, random.Random(seed)):
        try:
            header = read_picture_header(data)
            geometry = Qwen35(max_pixels=65_536).geometry(header.width, header.height)
            decode(data, header, geometry.width, geometry.height)
        except MediaError as error:
            refused += str(error).startswith(("decode image: ", "image aspect ratio "))
        else:
            read += 1
        seen += 1
    sys.stdout.write(f"{form}: {read} read, {refused} refused\n")
    sys.exit(read + refused != seen)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
