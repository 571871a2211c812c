"""Makes the rows that towers encode. A store has media decoded, one item at a time, and keeps the latest rows."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias

from runner.errors import MediaError
from runner.media.decode_process import DecodeProcess, decode_bytes, sound_bytes
from runner.media.families import Clip, PictureFamily
from runner.media.header import PictureHeader
from runner.media.prompt import Item, MediaPrompt, Picture, Sound, UnmeasuredPicture
from runner.media.sound_header import MEL_BINS
from runner.sizes import sized

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from runner.media.geometry import Pixels

MediaRows: TypeAlias = "Pixels | npt.NDArray[np.float32]"
"""The input of a tower: rows of a picture [patches, values], or rows of a sound [rows, values]."""
_MOST_BYTES = 128 << 20
_MOST_NAMES = 1 << 16


class Pictures(ABC):
    """A model's preparation of pictures: makes tokens and rows. Any thread may use it."""

    name: str
    """The name of this preparation in the digests of items."""
    title: str
    """The family's name in messages that hosts show: `qwen3.5 does not support audio input`."""
    mrope: bool
    soft: int
    """The id of a picture's soft tokens in a prompt."""

    @abstractmethod
    def picture(self, data: bytes, header: PictureHeader) -> Item:
        """Returns the item of a picture, still without a name. Raises MediaError for an unusable picture."""

    def check_prompt(self, prompt: MediaPrompt, context_length: int) -> None:
        """Raises RequestError for a prompt that the model cannot take."""
        del prompt, context_length

    def measure(self, header: PictureHeader, left: Callable[[], bool]) -> None:
        """Finds the tokens of an `UnmeasuredPicture`. Raises MediaError if that fails or once `left` returns True."""
        del header, left

    @abstractmethod
    def needed_bytes(self, picture: Picture) -> int:
        """Returns the most memory, in bytes, that making the rows of `picture` needs."""

    @abstractmethod
    def rows(self, picture: Picture, decoder: DecodeProcess, left: Callable[[], bool]) -> "MediaRows":
        """Decodes a picture and returns its rows. Raises MediaError if that fails or once `left` returns True."""


class FamilyPictures(Pictures):
    """The preparation of pictures by a family: `soft` is the id of soft tokens, `start` and `end` enclose them."""

    def __init__(self, family: PictureFamily, start: int, soft: int, end: int, sections: Sequence[int] = ()) -> None:
        """`sections` are the numbers of frequencies that rotate by time, row and column; () if positions have one
        channel."""
        self.family = family
        self.start, self.soft, self.end, self.sections = start, soft, end, sections
        self.name, self.title, self.mrope = family.name, family.title, family.mrope

    def picture(self, data: bytes, header: PictureHeader) -> Item:
        geometry = self.family.geometry(header.width, header.height)
        return Picture(data=data, header=header, geometry=geometry, before=[self.start], after=[self.end])

    def needed_bytes(self, picture: Picture) -> int:
        return decode_bytes(picture.header, picture.geometry, len(picture.data))

    def rows(self, picture: Picture, decoder: DecodeProcess, left: Callable[[], bool]) -> "MediaRows":
        import numpy as np

        geometry = picture.geometry
        found = decoder.decode_picture(picture.data, picture.header, geometry, self.family.alpha, left)
        pixels = np.frombuffer(found, np.uint8).reshape(geometry.height, geometry.width, 3)
        return self.family.patches(pixels, geometry)


class RowStore:
    """The rows of the media in requests. Any thread may use it.

    Every item is decoded once before its request is accepted, so that a damaged item is refused in time. Beyond a
    bound, the oldest rows are dropped. A dropped item is decoded again when a tower needs its rows.
    """

    def __init__(
        self, pictures: Pictures | None, most_bytes: int = _MOST_BYTES, decoder: DecodeProcess | None = None
    ) -> None:
        """Keeps at most `most_bytes` of rows."""
        self.room_bytes: int | None = None
        """The most memory that decoding an item may need; None for no such limit."""
        self.held_bytes = 0
        """The bytes of the kept rows."""
        self._pictures = pictures
        self._most_bytes = most_bytes
        self._decoder = decoder or DecodeProcess()
        self._decoding_bytes = 0  # the most memory that decoding the current item needs
        self._gives_way = False  # decoding the current item must stop
        self._thread = ThreadPoolExecutor(1, "decode")
        self._lock = Lock()
        self._rows: OrderedDict[int, MediaRows] = OrderedDict()
        self._wanted: set[int] = set()  # names of items whose rows are kept once they are decoded
        self._good: OrderedDict[int, Clip | None] = OrderedDict()  # items decoded without an error

    def close(self) -> None:
        self._thread.shutdown()

    @property
    def nbytes(self) -> int:
        """The bytes of the kept rows, plus the most memory that decoding the current item needs."""
        return self.held_bytes + self._decoding_bytes

    def give_way(self) -> None:
        """Frees memory for running requests: drops the kept rows, and refuses the item that is being decoded."""
        with self._lock:
            self._rows.clear()
            self.held_bytes = 0
        if self.room_bytes is not None and self._decoding_bytes:  # else decoding uses other memory than the model
            self._gives_way = True
            self._decoding_bytes = 0

    def is_good(self, item: Item) -> bool:
        """Returns True if the item was decoded before without an error."""
        with self._lock:
            return item.name in self._good

    def clip(self, name: int) -> Clip | None:
        """Returns the clip of the sound with this name; None if that sound was not decoded before."""
        with self._lock:
            return self._good.get(name)

    def rows(self, item: Item, left: Callable[[], bool]) -> "Future[MediaRows]":
        """Returns the rows of an item: removes the kept rows from the store, or decodes the item. The future raises
        MediaError for a damaged item, and once `left` returns True."""
        rows = self.drop(item)
        if rows is None:
            return self._thread.submit(self._decoded, item, left)
        found: Future[MediaRows] = Future()
        found.set_result(rows)
        return found

    def check(self, item: Item, left: Callable[[], bool]) -> Future[None]:
        """Decodes an item and keeps its rows while there is room, or measures an unmeasured picture. The future raises
        MediaError as the future of `rows` does."""
        if isinstance(item, UnmeasuredPicture):
            assert self._pictures is not None
            return self._thread.submit(self._pictures.measure, item.header, left)
        with self._lock:
            self._wanted.add(item.name)
        return self._thread.submit(self._keep, item, left)

    def drop(self, item: Item) -> "MediaRows | None":
        """Removes and returns the kept rows of an item; None without any. Rows still being decoded will not be kept."""
        with self._lock:
            self._wanted.discard(item.name)
            rows = self._rows.pop(item.name, None)
            self.held_bytes -= 0 if rows is None else rows.nbytes
            return rows

    def _keep(self, item: Item, left: Callable[[], bool]) -> None:
        if self.is_good(item):
            return
        rows = self._decoded(item, left)
        with self._lock:
            if item.name not in self._wanted:
                return
            self._wanted.remove(item.name)
            self._rows[item.name] = rows
            self.held_bytes += rows.nbytes
            while self.held_bytes > self._most_bytes:
                _, dropped = self._rows.popitem(last=False)
                self.held_bytes -= dropped.nbytes

    def _decoded(self, item: Item, left: Callable[[], bool]) -> "MediaRows":
        assert isinstance(item, Picture | Sound)
        if isinstance(item, Picture):
            assert self._pictures is not None
            needed, medium = self._pictures.needed_bytes(item), "a picture"
            extent = f"{item.header.width} x {item.header.height} pixels"
        else:
            needed, medium = sound_bytes(item.header), "a sound"
            extent = f"{item.header.frames / item.header.rate:.0f} seconds"
        if self.room_bytes is not None and needed > self.room_bytes:
            raise MediaError(
                f"there is no room to decode {medium} of {extent}: that takes about {sized(needed)}, and the model"
                f" leaves {sized(self.room_bytes)} of the budget. Send a smaller one, or give the runner more"
                " (--memory)"
            )
        self._gives_way = False
        self._decoding_bytes = needed
        try:
            rows, clip = self._decode(item, lambda: self._gives_way or left())
        except MediaError:
            if self._gives_way:
                why = f"there is no room to decode {medium} beside running requests: send it again later"
                raise MediaError(why) from None
            raise
        finally:
            self._decoding_bytes = 0
        with self._lock:
            self._good[item.name] = clip
            if len(self._good) > _MOST_NAMES:
                self._good.popitem(last=False)
        return rows

    def _decode(self, item: Picture | Sound, left: Callable[[], bool]) -> "tuple[MediaRows, Clip | None]":
        if isinstance(item, Picture):
            assert self._pictures is not None
            return self._pictures.rows(item, self._decoder, left), None
        import numpy as np

        lengths, found = self._decoder.decode_sound(item.data, item.header, item.family.frame_samples, left)
        width = item.family.frame_samples or MEL_BINS
        return np.frombuffer(found, np.float32).reshape(-1, width), item.family.clip_of(lengths)
