"""Pixels of pictures that requests show: decoded once, kept within a bound, and forgotten when they are taken."""

from collections.abc import Callable
from threading import Event, get_ident
from time import monotonic

import numpy as np
import pytest
from PIL import Image

from runner.errors import MediaError
from runner.media.decode_process import decode_bytes
from runner.media.families import Qwen35
from runner.media.geometry import Alpha, Geometry, grid
from runner.media.header import PictureHeader, read_picture_header
from runner.media.prompt import Item, Picture
from runner.media.row_store import FamilyPictures, MediaRows, RowStore
from tests.unit.media.pictures import Here, decode, encoded

FAMILY = Qwen35()
PICTURES = FamilyPictures(FAMILY, 60, 62, 61)
SIDE = 64
ROWS_BYTES = SIDE * SIDE * 3
"""Of every picture here."""


class Counted(RowStore):
    """Notes what it decodes, and where."""

    def __init__(self, most_bytes: int = 1 << 20) -> None:
        super().__init__(PICTURES, most_bytes, Here())
        self.decoded: list[int] = []
        self.threads: set[int] = set()

    def _decoded(self, item: Item, left: Callable[[], bool]) -> MediaRows:
        self.decoded.append(item.name)
        self.threads.add(get_ident())
        return super()._decoded(item, left)


def shown(name: int, data: bytes | None = None) -> Picture:
    data = data or encoded(Image.new("RGB", (40, 40), (name % 256, 7, 9)))
    return Picture(data=data, header=read_picture_header(data), geometry=grid(SIDE, SIDE, 16, 2), name=name)


def damaged(name: int) -> Picture:
    whole = encoded(Image.effect_noise((90, 90), 80).convert("RGB"))
    return shown(name, whole[: len(whole) // 2])


def test_rows_are_those_of_the_family_and_decoded_on_one_other_thread() -> None:
    store, picture = Counted(), shown(-1)
    rows = store.rows(picture, bool).result()
    pixels = decode(picture.data, picture.header, SIDE, SIDE)
    assert np.array_equal(rows, FAMILY.patches(pixels, picture.geometry))
    for name in range(-9, -1):
        store.check(shown(name), bool).result()
    assert len(store.threads) == 1
    assert get_ident() not in store.threads


def test_a_picture_that_was_checked_is_decoded_again_once_its_rows_were_taken() -> None:
    store, picture = Counted(), shown(-1)
    assert not store.is_good(picture)
    for _ in range(2):
        store.check(picture, bool).result()
        assert store.is_good(picture)
        assert store.held_bytes == ROWS_BYTES
    assert store.rows(picture, bool).result().nbytes == ROWS_BYTES
    assert store.held_bytes == 0
    store.check(picture, bool).result()  # a later turn: nothing to do
    assert store.is_good(picture)
    assert store.decoded == [-1]
    store.rows(picture, bool).result()
    assert store.decoded == [-1, -1]
    assert store.held_bytes == 0


def test_a_damaged_picture_is_never_sound() -> None:
    store, picture = Counted(), damaged(-1)
    for ask in (store.check, store.rows):
        with pytest.raises(MediaError, match="decode image"):
            ask(picture, bool).result()
    assert not store.is_good(picture)
    assert store.held_bytes == 0


def test_what_is_held_is_bounded_and_the_oldest_goes_first() -> None:
    store = Counted(3 * ROWS_BYTES + 100)
    pictures = [shown(name) for name in range(-1, -6, -1)]
    for number, picture in enumerate(pictures, 1):
        store.check(picture, bool).result()
        assert store.held_bytes == min(number, 3) * ROWS_BYTES
    assert [store.rows(picture, bool).result().nbytes for picture in pictures] == [ROWS_BYTES] * 5
    assert store.decoded == [-1, -2, -3, -4, -5, -1, -2]
    assert store.held_bytes == 0


def test_rows_that_nobody_will_take_are_dropped() -> None:
    store, picture = Counted(), shown(-1)
    store.check(picture, bool).result()
    store.drop(picture)
    store.drop(picture)
    assert store.held_bytes == 0
    assert store.is_good(picture)
    assert store.rows(picture, bool).result().nbytes == ROWS_BYTES


class Slow(Here):
    """Decodes until it is told to stop."""

    def __init__(self) -> None:
        self.began = Event()

    def decode_picture(
        self, data: bytes, header: PictureHeader, geometry: Geometry, alpha: Alpha, left: Callable[[], bool]
    ) -> bytes:
        self.began.set()
        limit = monotonic() + 10
        while not left():
            assert monotonic() < limit
        raise MediaError("it was told to")


def test_a_picture_that_takes_more_than_there_is_is_refused_with_the_numbers() -> None:
    store, picture = Counted(), shown(-1)
    needed = decode_bytes(picture.header, picture.geometry, len(picture.data))
    store.room_bytes = needed - 1
    text = r"^there is no room to decode a picture of 40 x 40 pixels: that takes about .* \(--memory\)$"
    with pytest.raises(MediaError, match=text):
        store.check(picture, bool).result()
    store.room_bytes = needed
    store.check(picture, bool).result()


def test_what_decoding_takes_counts_until_others_need_it() -> None:
    slow, kept, picture = Slow(), shown(-1), shown(-2)
    store = RowStore(PICTURES, decoder=Here())
    store.check(kept, bool).result()
    store._decoder = slow
    decoding = store.check(picture, bool)
    assert slow.began.wait(10)
    assert store.nbytes == ROWS_BYTES + decode_bytes(picture.header, picture.geometry, len(picture.data))
    store.give_way()
    assert store.nbytes > 0, "where its memory is not that of the device, it may go on"
    store.room_bytes = 1 << 30
    store.give_way()
    assert store.nbytes == 0
    with pytest.raises(MediaError, match="no room to decode a picture beside running requests: send it again later"):
        decoding.result(10)
    store._decoder = Here()
    store.check(picture, bool).result()
    assert store.nbytes == ROWS_BYTES
    store.close()


def test_a_client_that_leaves_ends_its_picture_and_no_other() -> None:
    slow, gone = Slow(), Event()
    store = RowStore(PICTURES, decoder=slow)
    first = store.check(shown(-1), gone.is_set)
    assert slow.began.wait(10)
    store._decoder = Here()
    second = store.check(shown(-1), bool)
    gone.set()
    with pytest.raises(MediaError, match="it was told to"):
        first.result(10)
    second.result(10)
    assert store.is_good(shown(-1))
    store.close()
