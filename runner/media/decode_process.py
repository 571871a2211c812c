"""The process that decodes media, and the runner's end of it.

Decoders are libraries that parse the bytes of strangers. In a process they can be ended at any moment, have a limit of
memory and of processor time, and never hold up another thread by the interpreter's lock.
"""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from math import ceil
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn
from weakref import finalize

import msgspec

from runner.errors import MediaError
from runner.media.geometry import Alpha, Geometry
from runner.media.header import Header
from runner.media.sound_header import SoundHeader

_PROGRAM = """
import sys
sys.path[:] = {path!a}
from runner.media.decode_process import serve
serve({descriptor})
"""
_LOOK_S = 0.05
"""Between two looks for an answer, and for a client that has left."""
_LOADING_S, _PATIENCE = 30, 4
"""The most time that an answer is waited for: for what is loaded first, and in times of its most processor time, since
the process may get a part of a core."""
_LEAST_S = 10
_MEGAPIXEL_S = 0.5
_MEGASAMPLE_S = 2.0
"""The most processor time, many times what a CPU needs: for any medium, for each megapixel of a picture, and for each
million samples of a sound."""
_SPARE_BYTES = 64 << 20
_PIECE_BYTES = 64 << 20


class Limited(msgspec.Struct, array_like=True, frozen=True):
    """An order, and the most bytes and processor time that it takes."""

    memory_bytes: int
    seconds: float


class Order(Limited, array_like=True, frozen=True, tag="picture"):
    """A picture to decode. Its parts follow, each as a message of its own."""

    parts: int
    header: Header
    width: int
    height: int
    alpha: Alpha


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """The end of an order: an error, or the number of messages that follow."""

    error: str
    parts: int


class SoundOrder(Limited, array_like=True, frozen=True, tag="sound"):
    """A sound to decode. The bytes of its samples follow, as one message."""

    header: SoundHeader
    frame_samples: int


class DecodeProcess:
    """The runner's end. Starts the process with the first medium. Owner: one thread at a time."""

    program = _PROGRAM

    def __init__(self) -> None:
        self._kill: Callable[[], None] = lambda: None
        self._end: Callable[[], object] = lambda: None
        self._connection: Connection | None = None

    def decode(self, data: bytes, header: Header, geometry: Geometry, alpha: Alpha, left: Callable[[], bool]) -> bytes:
        """Returns the pixels of a picture, upright and resized: [height, width, 3] of one byte each.

        Ends the process and raises MediaError as soon as `left` returns True, or when there is no answer for long.
        Raises MediaError for a damaged picture, and for one that takes more memory or time than its size explains.
        """
        pieces = [piece for piece in header.pieces(data) if piece]
        memory_bytes = decode_bytes(header, geometry, len(data)) + _SPARE_BYTES
        seconds = _LEAST_S + _MEGAPIXEL_S * header.width * header.height / 1e6
        plain = header._replace(kept=())
        order = Order(memory_bytes, seconds, len(pieces), plain, geometry.width, geometry.height, alpha)
        return self._answers(order, pieces, left, "decode image", "picture")[0]

    def decode_sound(
        self, data: bytes, header: SoundHeader, frame_samples: int, left: Callable[[], bool]
    ) -> tuple[list[int], bytes]:
        """Returns the number of rows of each piece of a sound, and its rows in float32: MEL_BINS numbers each, or
        `frame_samples` unless it is 0. Ends and raises as `decode`."""
        memory_bytes = sound_bytes(header) + _SPARE_BYTES
        seconds = _LEAST_S + _MEGASAMPLE_S * (header.frames + header.samples) / 1e6
        order = SoundOrder(memory_bytes, seconds, header, frame_samples)
        samples = memoryview(data)[header.start : header.stop]
        lengths, rows = self._answers(order, [samples], left, "decode audio", "sound")
        return msgspec.json.decode(lengths, type=list[int]), rows

    def _answers(
        self, order: Limited, pieces: Sequence[memoryview], left: Callable[[], bool], task: str, medium: str
    ) -> list[bytes]:
        """Returns what the process makes of an order and of the messages that follow it."""
        if left():
            raise MediaError(f"{task}: the client has left")
        if self._connection is None:
            self._start()
        try:
            most_s = _LOADING_S + _PATIENCE * order.seconds
            answer, parts = self._asked([msgspec.json.encode(order), *pieces], most_s, left, task)
        except (EOFError, OSError):
            self._stop()
            raise MediaError(
                f"{task}: decoding takes more memory or time than a {medium} of this size should: save it in"
                " another format"
            ) from None
        if answer.error:
            raise MediaError(answer.error)
        return parts

    def _asked(
        self, messages: Iterable[bytes | memoryview], seconds: float, left: Callable[[], bool], task: str
    ) -> tuple[Answer, list[bytes]]:
        """Returns the answer to messages, and what follows it. Raises EOFError or OSError if the process ends.

        Ends it and raises MediaError if it does not take them and answer within `seconds`: someone may have stopped it.
        The time is counted in looks, of which there are none while this process is stopped too.
        """
        assert self._connection is not None
        with ThreadPoolExecutor(1, "ask") as thread:  # the pipe to a process that was stopped blocks when it is full
            asked = thread.submit(_exchanged, self._connection, messages)
            reason = f"the decoding process did not answer in {seconds:.0f} s and was ended: send it again"
            for _ in range(ceil(seconds / _LOOK_S)):
                if _answered(asked):
                    return asked.result()
                if left():
                    reason = "the client has left"
                    break
            self._kill()  # before its end is closed, which the thread uses
        self._stop()
        raise MediaError(f"{task}: {reason}")

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        program = self.program.format(path=sys.path, descriptor=theirs.fileno())
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - this program
                [sys.executable, "-I", "-X", f"utf8={sys.flags.utf8_mode}", "-c", program],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the host reads the runner's output to its end
                stderr=subprocess.DEVNULL,
            )
        self._kill = process.kill
        self._end = finalize(self, _end, process, self._connection)

    def _stop(self) -> None:
        """Ends the process. The next medium starts another."""
        self._end()
        self._connection = None


def _exchanged(connection: Connection, messages: Iterable[bytes | memoryview]) -> tuple[Answer, list[bytes]]:
    for message in messages:
        connection.send_bytes(message)
    answer = msgspec.json.decode(connection.recv_bytes(), type=Answer)
    return answer, [connection.recv_bytes() for _ in range(answer.parts)]


def _answered(asked: "Future[tuple[Answer, list[bytes]]]") -> bool:
    """Looks for an answer, for a moment."""
    return bool(wait([asked], _LOOK_S).done)


def _end(process: "subprocess.Popen[bytes]", connection: Connection) -> None:
    process.kill()
    connection.close()
    process.wait()


def decode_bytes(header: Header, geometry: Geometry, size: int) -> int:
    """Returns the most bytes that decoding a picture from a file of `size` bytes takes at once.

    For each pixel: its canvas, the same once more to be turned, and, where libraries keep them, two or three canvases.
    """
    pixel_bytes = 20 if header.format in ("WebP", "AVIF") else 12
    resizing = geometry.width * (header.height * 4 + geometry.height * 12)
    return header.width * header.height * pixel_bytes + resizing + 3 * size


def sound_bytes(header: SoundHeader) -> int:
    """Returns the most bytes that decoding a sound takes at once: its samples as they come, twice, at the rate of
    towers, and as rows, which take no more; and what a block takes while its rate or its spectra are computed."""
    twice = 0 if header.is_exact else 8 * header.frames  # before they have that rate
    return 3 * (header.stop - header.start) + 24 * header.samples + twice + _PIECE_BYTES


# --- in the process


def serve(descriptor: int) -> NoReturn:
    """Decodes media until the runner closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the runner decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.putenv("OPENBLAS_NUM_THREADS", "1")  # for numpy, which is imported later: one medium is decoded at a time
    connection = Connection(descriptor)
    with suppress(EOFError, OSError):
        while True:
            order = msgspec.json.decode(connection.recv_bytes(), type=Order | SoundOrder)
            decode = _decoder(order)
            base_bytes = address_bytes()
            data = b"".join([connection.recv_bytes() for _ in range(order.parts if isinstance(order, Order) else 1)])
            limit(base_bytes + order.memory_bytes, order.seconds)
            parts, error = list[bytes](), ""
            try:
                parts = decode(data)
            except MediaError as refusal:
                error = str(refusal)
            limit(resource.RLIM_INFINITY, 0)
            connection.send_bytes(msgspec.json.encode(Answer(error, len(parts))))
            for part in parts:
                connection.send_bytes(part)
    os._exit(0)


def _decoder(order: Order | SoundOrder) -> Callable[[bytes], list[bytes]]:
    """Loads what decodes, Pillow or numpy, which is no part of what decoding one item takes."""
    if isinstance(order, Order):
        from runner.media import picture

        return lambda data: [picture.decode(data, order.header, order.width, order.height, order.alpha).tobytes()]
    from runner.media import sound

    sound.warm_up()
    if not order.header.is_exact:
        import soundfile  # noqa: F401 - with all that it loads

    def decode(data: bytes) -> list[bytes]:
        lengths, rows = sound.decode(data, order.header, order.frame_samples)
        return [msgspec.json.encode(lengths), rows.tobytes()]

    return decode


def limit(most_bytes: int, seconds: float) -> None:
    """Bounds the memory, on Linux alone, and the processor time, whose end ends the process."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def address_bytes() -> int:
    """Returns the address space that this process has, on Linux alone."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
