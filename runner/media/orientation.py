"""The orientation that a camera wrote into EXIF: how stored pixels must be turned to be seen upright."""

from typing import Literal

UPRIGHT = 1

_ORDERS: dict[bytes, Literal["little", "big"]] = {b"II*\0": "little", b"MM\0*": "big"}
_ORIENTATION = 0x0112
_SHORT = 3
_ENTRY_BYTES = 12


def orientation_of(exif: bytes) -> int:
    """Returns 1 to 8, from a block of EXIF with or without its `Exif` prefix; 1 for blocks that cannot be read.

    A picture with damaged EXIF is still a picture, so nothing is raised.
    """
    tiff = exif.removeprefix(b"Exif\0\0")
    order = _ORDERS.get(tiff[:4])
    if order is None:
        return UPRIGHT

    def number(place: int, size: int) -> int:
        return int.from_bytes(tiff[place : place + size], order)

    directory = number(4, 4)
    first = directory + 2
    for entry in range(first, first + number(directory, 2) * _ENTRY_BYTES, _ENTRY_BYTES):
        if entry + _ENTRY_BYTES > len(tiff):
            break
        if number(entry, 2) == _ORIENTATION:
            found = number(entry + 8, 2)
            return found if number(entry + 2, 2) == _SHORT and 1 <= found <= 8 else UPRIGHT
    return UPRIGHT
