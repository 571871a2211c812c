"""Encodes pictures: pixels in another process, features on the engine thread, one piece of the tower at a time."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from time import perf_counter
from typing import TYPE_CHECKING

import mlx.core as mx

from protocol.stats import PictureCounts
from runner.media.pixels import PixelStore
from runner.media.prompt import Picture
from runner.model.pictures.forward import PictureForward
from runner.model.towers.tower import Grid, Tower

if TYPE_CHECKING:
    from runner.media.geometry import Pixels

MOST_FEATURE_BYTES = 64 << 20
"""The most bytes of features that are kept for prompts whose keys and values are gone."""


class PictureEncoder:
    """The tower of a model, and the features that it made last. Owner: the engine thread."""

    def __init__(
        self, tower: Tower, pixels: PixelStore, forward: PictureForward, wake: Callable[[], None], *, splits: bool
    ) -> None:
        """`wake` is called, on another thread, when pixels are there. `splits`: a forward may end between two tokens of
        one picture."""
        self.forward = forward
        self.splits = splits
        self._encoded = self._soft_tokens = self._hits = 0
        self._encode_s = 0.0
        self._tower, self._pixels, self._wake = tower, pixels, wake
        self._features: OrderedDict[int, mx.array] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """The bytes of the features that are kept."""
        return sum(each.nbytes for each in self._features.values())

    @property
    def counts(self) -> PictureCounts:
        """The counts so far."""
        return PictureCounts(
            encoded=self._encoded,
            soft_tokens=self._soft_tokens,
            encode_s=self._encode_s,
            feature_hits=self._hits,
            feature_bytes=self.nbytes,
            pixel_bytes=self._pixels.held_bytes,
        )

    def known(self, picture: Picture) -> mx.array | None:
        """Returns the features [tokens, width] of a picture that was encoded lately."""
        found = self._features.get(picture.name)
        if found is not None:
            self._features.move_to_end(picture.name)
            self._hits += 1
        return found

    def keep(self, picture: Picture, features: mx.array) -> None:
        """Keeps features for later prompts, and drops the oldest that do not fit beside them."""
        self._features[picture.name] = features
        self._features.move_to_end(picture.name)
        while self._features and self.nbytes > MOST_FEATURE_BYTES:
            self._features.popitem(last=False)

    def clear(self) -> None:
        """Drops all features."""
        self._features.clear()

    def needed_bytes(self, picture: Picture) -> int:
        """Returns about how many bytes encoding this picture takes at once."""
        geometry = picture.geometry
        return self._tower.encode_bytes(Grid(geometry.rows, geometry.columns))

    def decode(self, picture: Picture, left: Callable[[], bool]) -> "Future[Pixels]":
        """Returns the rows of the tower, which are decoded elsewhere unless they were before, or until `left`."""
        decoding = self._pixels.rows(picture, left)
        if not decoding.done():
            decoding.add_done_callback(lambda _: self._wake())
        return decoding

    def encode(self, picture: Picture, rows: "Pixels") -> Iterator[mx.array]:
        """Computes the features, of which every step yields a part that is evaluated; the last one is the whole."""
        geometry = picture.geometry
        for part in self._tower.encode(mx.array(rows), Grid(geometry.rows, geometry.columns)):
            started = perf_counter()
            mx.eval(part)
            self._encode_s += perf_counter() - started
            yield part
        self._encoded += 1
        self._soft_tokens += geometry.tokens
