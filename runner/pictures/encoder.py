"""Encodes pictures: pixels in another process, features on the engine thread, one piece of the tower at a time."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from time import perf_counter
from typing import TYPE_CHECKING

import mlx.core as mx

from protocol.stats import PictureCounts
from runner.pictures.forward import PictureForward, Rows
from runner.pictures.pixels import PixelStore
from runner.pictures.prompt import Picture, PicturePrompt
from runner.pictures.towers.tower import Grid, Tower

if TYPE_CHECKING:
    from runner.pictures.geometry import Pixels

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

    def begin(self, prompt: PicturePrompt) -> "PictureProgress":
        """Returns the pictures of one request, none of which is encoded yet."""
        return PictureProgress(prompt, self)

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


# --- The pictures of one request, on their way into its prompt.

Forward = Callable[[mx.array, list[object]], mx.array]


class PictureProgress:
    """Has the next picture encoded when the prefill reaches it; one that is cached needs neither pixels nor features.

    Owner: the engine thread. Holds the features of one picture at a time.
    """

    def __init__(self, prompt: PicturePrompt, encoder: PictureEncoder) -> None:
        self.prompt = prompt
        self._encoder = encoder
        self._picture: Picture | None = None  # the one at hand
        self._features: mx.array | None = None  # of that one
        self._decoding: Future[Pixels] | None = None
        self._encoding: Iterator[mx.array] | None = None

    @property
    def shift(self) -> int:
        """The position of a token behind the prompt, less its offset; 0 or negative."""
        return self.prompt.shift

    @property
    def ready(self) -> bool:
        """True if `advance` has something to compute, False while a helper decodes."""
        return self._decoding is None or self._decoding.done()

    @property
    def needed_bytes(self) -> int:
        """The bytes that encoding the picture at hand takes at once; 0 once that has begun."""
        return self._encoder.needed_bytes(self._picture) if self._picture and self._encoding is None else 0

    def lacks(self, position: int) -> bool:
        """Returns True if the picture at `position` has to be encoded before the prefill goes on."""
        span = self.prompt.next_span(position)
        if span is None or span.start > position:
            return False
        if self._picture is not span.picture:
            self.close()
            self._picture = span.picture
            self._features = self._encoder.known(span.picture)
        return self._features is None

    def advance(self) -> bool:
        """Computes one piece of the picture at hand. Returns True when its features are there."""
        assert self._picture is not None
        if self._decoding is None:
            picture = self._picture
            self._decoding = self._encoder.decode(picture, lambda: self._picture is not picture)
            return False
        if self._encoding is None:
            self._encoding = self._encoder.encode(self._picture, self._decoding.result())
        for self._features in self._encoding:  # noqa: B020 - the last one stays
            return False
        assert self._features is not None
        self._encoder.keep(self._picture, self._features)
        self._encoding = self._decoding = None
        return True

    def slice_tokens(self, position: int, most: int) -> int:
        """Returns the tokens of the next forward at `position`, given the most that are wanted.

        It ends before a picture that is not encoded, and, where tokens of a picture see each other, never inside one.
        """
        span = self.prompt.next_span(position)
        if span is None or position + most <= span.start:
            return most
        if span.start > position:
            return span.start - position
        return min(most, span.stop - position) if self._encoder.splits else span.stop - position

    def forward(self, recorded: Sequence[int], at: int, count: int, layers: list[object], run: Forward) -> None:
        """Builds the forward over the `count` recorded tokens from `at` on."""
        stop = at + count
        rows = []
        span = self.prompt.next_span(at)
        if span is not None and span.start < stop:
            assert self._features is not None
            first, last = max(at, span.start), min(stop, span.stop)
            features = self._features[first - span.start : last - span.start]
            rows = [Rows(first - at, last - at, features)]
            following = self.prompt.next_span(stop)
            if following is None or following.picture is not span.picture:
                self.close()
        tokens = recorded[at:stop]
        self._encoder.forward(tokens, layers, rows, self.prompt.positions(at, stop), run)

    @property
    def shifted(self) -> Callable[[Sequence[int]], AbstractContextManager[None]]:
        """Returns a block in which forwards shift the positions of each row of a batch. Keeps no picture alive."""
        return self._encoder.forward.shifted

    def close(self) -> None:
        """Frees pixels and features."""
        if self._decoding is not None:
            self._decoding.cancel()
        self._picture = self._features = self._decoding = self._encoding = None
