"""The process that decodes pictures and sounds, within limits that follow from the header of each file."""

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
"""The limit of processor time, many times the usual: for any item, plus for each megapixel or million samples."""
_SPARE_BYTES = 64 << 20
_PIECE_BYTES = 64 << 20


class PictureOrder(Limited, array_like=True, frozen=True, tag="picture"):
    """An order to decode a picture. `parts` messages follow, each with one part of the file."""

    parts: int
    header: PictureHeader
    width: int
    height: int
    alpha: Alpha


class SoundOrder(Limited, array_like=True, frozen=True, tag="sound"):
    """An order to decode a sound. One message follows, with the part of the file that holds the samples."""

    header: SoundHeader
    frame_samples: int


class DecodeProcess(OrderProcess):
    """The runner's end of the process that decodes. Owner: one thread at a time."""

    module = __name__

    def decode_picture(
        self, data: bytes, header: PictureHeader, geometry: Geometry, alpha: Alpha, left: Callable[[], bool]
    ) -> bytes:
        """Returns the pixels of a picture, upright and resized: uint8 [height, width, 3].

        Raises MediaError for a damaged picture, and for a picture that exceeds the limits of memory or time. Ends the
        process and raises MediaError once `left` returns True, or if the answer takes too long.
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
        """Returns the number of rows of each piece of a sound, and the bytes of all rows in float32. A row has
        `frame_samples` numbers, or MEL_BINS if `frame_samples` is 0. Raises MediaError as `decode_picture` does."""
        memory_bytes = sound_bytes(header) + _SPARE_BYTES
        seconds = _LEAST_S + _MEGASAMPLE_S * (header.frames + header.samples) / 1e6
        order = SoundOrder(memory_bytes, seconds, header, frame_samples)
        samples = memoryview(data)[header.start : header.stop]
        lengths, rows = self._answers(order, [samples], left, "decode audio", "sound")
        return msgspec.json.decode(lengths, type=list[int]), rows


def decode_bytes(header: PictureHeader, geometry: Geometry, size: int) -> int:
    """Returns the most memory, in bytes, that decoding a picture needs. `size` is the size of its file."""
    pixel_bytes = 20 if header.format in ("WebP", "AVIF") else 12  # a canvas, its turned copy, the libraries' copies
    resizing = geometry.width * (header.height * 4 + geometry.height * 12)
    return header.width * header.height * pixel_bytes + resizing + 3 * size


def sound_bytes(header: SoundHeader) -> int:
    """Returns the most memory, in bytes, that decoding a sound needs: for copies of its part of the file, its samples
    at RATE and its rows, and for one block that is being resampled or turned into spectra."""
    twice = 0 if header.is_exact else 8 * header.frames  # float32 samples at the rate of the file, and a joined copy
    return 3 * (header.stop - header.start) + 24 * header.samples + twice + _PIECE_BYTES


def serve(channel: Channel) -> None:
    """Answers orders until the runner closes its end of `channel`."""
    os.putenv("OPENBLAS_NUM_THREADS", "1")  # for numpy, imported later: one item is decoded at a time
    while True:
        order = msgspec.json.decode(channel.receive(), type=PictureOrder | SoundOrder)
        decode = _decoder(order)
        base_bytes = address_bytes()
        parts = order.parts if isinstance(order, PictureOrder) else 1
        data = b"".join([channel.receive() for _ in range(parts)])
        answer_order(channel, order, base_bytes, partial(decode, data))


def _decoder(order: PictureOrder | SoundOrder) -> Callable[[bytes], list[bytes]]:
    """Returns the decoder for an order. Loads Pillow or numpy now, so that the order's limits do not count them."""
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
