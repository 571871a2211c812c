"""The process that decodes pictures and sounds, and the limits that follow from their headers."""

import os
from collections.abc import Callable
from functools import partial

import msgspec

from runner.media.geometry import Alpha, Geometry
from runner.media.header import PictureHeader
from runner.media.sound_header import SoundHeader
from runner.process.child import Channel
from runner.process.orders import Limited, OrderProcess, address_bytes, answer_order

_LEAST_S = 10
_MEGAPIXEL_S = 0.5
_MEGASAMPLE_S = 2.0
"""The most processor time, many times the usual: for any medium, a megapixel of a picture, and a million samples."""
_SPARE_BYTES = 64 << 20
_PIECE_BYTES = 64 << 20


class PictureOrder(Limited, array_like=True, frozen=True, tag="picture"):
    """A picture to decode. Its parts follow, each as a message of its own."""

    parts: int
    header: PictureHeader
    width: int
    height: int
    alpha: Alpha


class SoundOrder(Limited, array_like=True, frozen=True, tag="sound"):
    """A sound to decode. The bytes of its samples follow, as one message."""

    header: SoundHeader
    frame_samples: int


class DecodeProcess(OrderProcess):
    """The runner's side. Owner: one thread at a time."""

    module = __name__

    def decode_picture(
        self, data: bytes, header: PictureHeader, geometry: Geometry, alpha: Alpha, left: Callable[[], bool]
    ) -> bytes:
        """Returns the pixels of a picture, upright and resized: uint8 [height, width, 3].

        Raises MediaError for a damaged picture, and for one that takes more memory or time than its size explains. Ends
        the process and raises MediaError once `left` returns True, or if there is no answer for long.
        """
        pieces = header.pieces(data)
        memory_bytes = decode_bytes(header, geometry, len(data)) + _SPARE_BYTES
        seconds = _LEAST_S + _MEGAPIXEL_S * header.width * header.height / 1e6
        plain = header._replace(kept=())
        order = PictureOrder(memory_bytes, seconds, len(pieces), plain, geometry.width, geometry.height, alpha)
        return self._answers(order, pieces, left, "decode image", "picture")[0]

    def decode_sound(
        self, data: bytes, header: SoundHeader, frame_samples: int, left: Callable[[], bool]
    ) -> tuple[list[int], bytes]:
        """Returns the number of rows of each piece of a sound, and its rows in float32: of `frame_samples` numbers, or
        of MEL_BINS if that is 0. Raises as `decode_picture`."""
        memory_bytes = sound_bytes(header) + _SPARE_BYTES
        seconds = _LEAST_S + _MEGASAMPLE_S * (header.frames + header.samples) / 1e6
        order = SoundOrder(memory_bytes, seconds, header, frame_samples)
        samples = memoryview(data)[header.start : header.stop]
        lengths, rows = self._answers(order, [samples], left, "decode audio", "sound")
        return msgspec.json.decode(lengths, type=list[int]), rows


def decode_bytes(header: PictureHeader, geometry: Geometry, size: int) -> int:
    """Returns the most bytes that decoding a picture from a file of `size` bytes takes at once."""
    pixel_bytes = 20 if header.format in ("WebP", "AVIF") else 12  # a canvas, its turned copy, and those of libraries
    resizing = geometry.width * (header.height * 4 + geometry.height * 12)
    return header.width * header.height * pixel_bytes + resizing + 3 * size


def sound_bytes(header: SoundHeader) -> int:
    """Returns the most bytes that decoding a sound takes at once: its samples in the file, twice, at the rate of
    towers, and as rows, which take no more; and a block whose rate or spectra are computed."""
    twice = 0 if header.is_exact else 8 * header.frames  # decoded, at the rate of the file
    return 3 * (header.stop - header.start) + 24 * header.samples + twice + _PIECE_BYTES


def serve(channel: Channel) -> None:
    """Decodes media until the runner closes its end."""
    os.putenv("OPENBLAS_NUM_THREADS", "1")  # for numpy, which is imported later: one medium is decoded at a time
    while True:
        order = msgspec.json.decode(channel.receive(), type=PictureOrder | SoundOrder)
        decode = _decoder(order)
        base_bytes = address_bytes()
        parts = order.parts if isinstance(order, PictureOrder) else 1
        data = b"".join([channel.receive() for _ in range(parts)])
        answer_order(channel, order, base_bytes, partial(decode, data))


def _decoder(order: PictureOrder | SoundOrder) -> Callable[[bytes], list[bytes]]:
    """Returns the decoder. Loads Pillow or numpy, which count towards the limits of no item."""
    if isinstance(order, PictureOrder):
        from runner.media import picture

        return lambda data: [
            picture.decode_picture(data, order.header, order.width, order.height, order.alpha).tobytes()
        ]
    from runner.media import sound

    sound.decode_silence()
    if not order.header.is_exact:
        import soundfile  # noqa: F401

    def decode(data: bytes) -> list[bytes]:
        lengths, rows = sound.decode_sound(data, order.header, order.frame_samples)
        return [msgspec.json.encode(lengths), rows.tobytes()]

    return decode
