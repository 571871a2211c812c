"""Decodes pictures on a thread of its own, one at a time, and keeps what it decoded last."""

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING

from runner.media.families.family import Family
from runner.media.prompt import Picture

if TYPE_CHECKING:
    from runner.media.picture import Pixels

_MOST_BYTES = 128 << 20
_MOST_NAMES = 1 << 16


class PixelStore:
    """The rows that a tower takes, of pictures that requests show. Any thread may use it.

    Every picture is decoded before its request is taken, so that a damaged one is refused in time; only one that was
    decoded before is taken as it is. Rows for which there is no room are dropped, and decoded again when they are
    needed: requests that wait hold files, not pixels.
    """

    def __init__(self, family: Family, most_bytes: int = _MOST_BYTES) -> None:
        """Keeps at most `most_bytes` of rows."""
        self._family, self._most_bytes = family, most_bytes
        self._thread = ThreadPoolExecutor(1, "pixels")
        self._lock = Lock()
        self._rows: OrderedDict[int, Pixels] = OrderedDict()
        self._wanted: set[int] = set()  # names of pictures whose rows are to be kept when they are decoded
        self._sound: OrderedDict[int, None] = OrderedDict()  # names of pictures that were decoded without an error
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """The bytes of rows that are kept."""
        return self._held_bytes

    def is_sound(self, picture: Picture) -> bool:
        """Returns True if the picture was decoded before."""
        with self._lock:
            return picture.name in self._sound

    def rows(self, picture: Picture) -> "Future[Pixels]":
        """Returns the rows of a picture, uint8 [patches, values], which are forgotten here once they are taken.

        The future raises MediaError for a damaged picture.
        """
        rows = self._taken(picture)
        if rows is None:
            return self._thread.submit(self._decoded, picture)
        found: Future[Pixels] = Future()
        found.set_result(rows)
        return found

    def drop(self, picture: Picture) -> None:
        """Forgets the rows of a picture, which a request that has ended would have taken. If it is being decoded, they
        are not kept."""
        self._taken(picture)

    def check(self, picture: Picture) -> "Future[None]":
        """Decodes a picture, and keeps its rows while there is room. The future raises MediaError for a damaged one."""
        with self._lock:
            self._wanted.add(picture.name)
        return self._thread.submit(self._keep, picture)

    def _taken(self, picture: Picture) -> "Pixels | None":
        with self._lock:
            self._wanted.discard(picture.name)
            rows = self._rows.pop(picture.name, None)
            self._held_bytes -= 0 if rows is None else rows.nbytes
            return rows

    def _keep(self, picture: Picture) -> None:
        if self.is_sound(picture):
            return
        rows = self._decoded(picture)
        with self._lock:
            if picture.name not in self._wanted:
                return
            self._wanted.remove(picture.name)
            self._rows[picture.name] = rows
            self._held_bytes += rows.nbytes
            while self._held_bytes > self._most_bytes:
                _, dropped = self._rows.popitem(last=False)
                self._held_bytes -= dropped.nbytes

    def _decoded(self, picture: Picture) -> "Pixels":
        from runner.media.picture import decode  # imports Pillow and numpy

        geometry = picture.geometry
        pixels = decode(picture.data, picture.header, geometry.width, geometry.height, self._family.alpha)
        rows = self._family.patches(pixels, geometry)
        with self._lock:
            self._sound[picture.name] = None
            if len(self._sound) > _MOST_NAMES:
                self._sound.popitem(last=False)
        return rows
