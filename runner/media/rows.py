"""Has pictures decoded by a process of its own, one at a time, and keeps what was decoded last."""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from runner.errors import MediaError
from runner.media.decode_process import DecodeProcess, decode_bytes
from runner.media.families import Family
from runner.media.geometry import Pixels
from runner.media.prompt import Picture
from runner.sizes import shown

_MOST_BYTES = 128 << 20
_MOST_NAMES = 1 << 16


class RowStore:
    """The rows that a tower takes, of pictures that requests show. Any thread may use it.

    Every picture is decoded before its request is taken, so that a damaged one is refused in time; only one that was
    decoded before is taken as it is. Rows for which there is no room are dropped, and decoded again when they are
    needed: requests that wait hold files, not pixels.
    """

    def __init__(self, family: Family, most_bytes: int = _MOST_BYTES, decoder: DecodeProcess | None = None) -> None:
        """Keeps at most `most_bytes` of rows."""
        self.room_bytes: int | None = None
        """The most that decoding a picture may take; None: whatever its size explains."""
        self._family = family
        self._most_bytes = most_bytes
        self._decoder = decoder or DecodeProcess()
        self._decoding_bytes = 0  # the most that the current picture takes
        self._gives_way = False  # the current picture must end
        self._thread = ThreadPoolExecutor(1, "pixels")
        self._lock = Lock()
        self._rows: OrderedDict[int, Pixels] = OrderedDict()
        self._wanted: set[int] = set()  # names of pictures whose rows are to be kept when they are decoded
        self._sound: OrderedDict[int, None] = OrderedDict()  # names of pictures that were decoded without an error
        self._held_bytes = 0

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()

    @property
    def held_bytes(self) -> int:
        """The bytes of rows that are kept."""
        return self._held_bytes

    @property
    def nbytes(self) -> int:
        """The bytes of rows that are kept, and the most that the current picture takes while it is decoded."""
        return self._held_bytes + self._decoding_bytes

    def give_way(self) -> None:
        """Drops the rows that are kept, and ends the current picture, which is refused: others need the memory."""
        with self._lock:
            self._rows.clear()
            self._held_bytes = 0
        if self.room_bytes is not None and self._decoding_bytes:  # else it takes nothing of what others need
            self._gives_way = True
            self._decoding_bytes = 0

    def is_sound(self, picture: Picture) -> bool:
        """Returns True if the picture was decoded before."""
        with self._lock:
            return picture.name in self._sound

    def rows(self, picture: Picture, left: Callable[[], bool]) -> "Future[Pixels]":
        """Returns the rows of a picture, uint8 [patches, values], which are forgotten here once they are taken.

        The future raises MediaError for a damaged picture, and once `left` returns True.
        """
        rows = self._taken(picture)
        if rows is None:
            return self._thread.submit(self._decoded, picture, left)
        found: Future[Pixels] = Future()
        found.set_result(rows)
        return found

    def drop(self, picture: Picture) -> None:
        """Forgets the rows of a picture, which a request that has ended would have taken. If it is being decoded, they
        are not kept."""
        self._taken(picture)

    def check(self, picture: Picture, left: Callable[[], bool]) -> "Future[None]":
        """Decodes a picture, and keeps its rows while there is room. The future raises MediaError as for `rows`."""
        with self._lock:
            self._wanted.add(picture.name)
        return self._thread.submit(self._keep, picture, left)

    def needed_bytes(self, picture: Picture) -> int:
        """Returns the most bytes that decoding a picture takes at once."""
        return decode_bytes(picture.header, picture.geometry, len(picture.data))

    def made(self, picture: Picture, left: Callable[[], bool]) -> "Pixels":
        """Decodes a picture, and returns its rows. Raises MediaError, and once `left` returns True."""
        import numpy as np

        geometry = picture.geometry
        found = self._decoder.decode(picture.data, picture.header, geometry, self._family.alpha, left)
        pixels = np.frombuffer(found, np.uint8).reshape(geometry.height, geometry.width, 3)
        return self._family.patches(pixels, geometry)

    def _taken(self, picture: Picture) -> "Pixels | None":
        with self._lock:
            self._wanted.discard(picture.name)
            rows = self._rows.pop(picture.name, None)
            self._held_bytes -= 0 if rows is None else rows.nbytes
            return rows

    def _keep(self, picture: Picture, left: Callable[[], bool]) -> None:
        if self.is_sound(picture):
            return
        rows = self._decoded(picture, left)
        with self._lock:
            if picture.name not in self._wanted:
                return
            self._wanted.remove(picture.name)
            self._rows[picture.name] = rows
            self._held_bytes += rows.nbytes
            while self._held_bytes > self._most_bytes:
                _, dropped = self._rows.popitem(last=False)
                self._held_bytes -= dropped.nbytes

    def _decoded(self, picture: Picture, left: Callable[[], bool]) -> "Pixels":
        header = picture.header
        needed = self.needed_bytes(picture)
        if self.room_bytes is not None and needed > self.room_bytes:
            raise MediaError(
                f"there is no room to decode a picture of {header.width} x {header.height} pixels: that takes about"
                f" {shown(needed)}, and the model leaves {shown(self.room_bytes)} of the budget. Send a smaller one, or"
                " give the runner more (--memory)"
            )
        self._gives_way = False
        self._decoding_bytes = needed
        try:
            rows = self.made(picture, lambda: self._gives_way or left())
        except MediaError:
            if self._gives_way:
                raise MediaError("there is no room to decode a picture beside what runs: send it again later") from None
            raise
        finally:
            self._decoding_bytes = 0
        with self._lock:
            self._sound[picture.name] = None
            if len(self._sound) > _MOST_NAMES:
                self._sound.popitem(last=False)
        return rows
