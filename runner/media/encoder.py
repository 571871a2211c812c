"""Encodes pictures: pixels in another process, features on the engine thread, one piece of the tower at a time."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import TYPE_CHECKING

import mlx.core as mx

from protocol.stats import MediaCounts
from runner.engine.generation import Forward
from runner.engine.ports import Shifted
from runner.engine.request import ShownPrompt
from runner.media.forward import MediaForward, Rows
from runner.media.prompt import MediaPrompt, Picture
from runner.media.rows import RowStore
from runner.media.towers.tower import Grid, Tower

if TYPE_CHECKING:
    from runner.media.geometry import Pixels

MOST_FEATURE_BYTES = 64 << 20
"""The most bytes of features that are kept for prompts whose keys and values are gone."""


class MediaEncoder:
    """The tower of a model, and the features that it made last. Owner: the engine thread."""

    def __init__(
        self, tower: Tower, store: RowStore, forward: MediaForward, wake: Callable[[], None], *, splits: bool
    ) -> None:
        """`wake` is called, on another thread, when pixels are there. `splits`: a forward may end between two tokens of
        one picture."""
        self.forward = forward
        self.splits = splits
        self._encoded = self._soft_tokens = self._hits = 0
        self._encode_s = 0.0
        self._tower = tower
        self._store = store
        self._wake = wake
        self._features: OrderedDict[int, mx.array] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """The bytes of the features that are kept."""
        return sum(each.nbytes for each in self._features.values())

    def begin(self, prompt: ShownPrompt) -> "MediaProgress":
        """Returns the pictures of one request, none of which is encoded yet."""
        assert isinstance(prompt, MediaPrompt)
        return MediaProgress(prompt, self)

    @property
    def shifted(self) -> Shifted:
        """Shifts the positions of answers after pictures."""
        return self.forward.shifted

    def counts(self) -> MediaCounts:
        """The counts so far."""
        return MediaCounts(
            encoded=self._encoded,
            soft_tokens=self._soft_tokens,
            encode_s=self._encode_s,
            feature_hits=self._hits,
            feature_bytes=self.nbytes,
            row_bytes=self._store.held_bytes,
        )

    def known(self, picture: Picture) -> mx.array | None:
        """Returns the features [tokens, width] of a picture that was encoded recently."""
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
        """Returns about the bytes that encoding this picture takes at once."""
        geometry = picture.geometry
        return self._tower.encode_bytes(Grid(geometry.rows, geometry.columns))

    def decode(self, picture: Picture, left: Callable[[], bool]) -> "Future[Pixels]":
        """Returns the rows of the tower, which are decoded elsewhere unless they already were. Ends when `left`."""
        decoding = self._store.rows(picture, left)
        if not decoding.done():
            decoding.add_done_callback(lambda _: self._wake())
        return decoding

    def encode(self, picture: Picture, rows: "Pixels") -> Iterator[mx.array]:
        """Computes the features. Every step yields an evaluated part; the last one is the whole."""
        geometry = picture.geometry
        grid = Grid(geometry.rows, geometry.columns)
        yield from self.evaluated(self._tower.encode(mx.array(rows), grid), picture)

    def evaluated(self, parts: Iterable[mx.array], picture: Picture) -> Iterator[mx.array]:
        """Evaluates the parts of a picture's encoding one by one, and counts them."""
        for part in parts:
            started = perf_counter()
            mx.eval(part)
            self._encode_s += perf_counter() - started
            yield part
        self._encoded += 1
        self._soft_tokens += picture.geometry.tokens


class MediaProgress:
    """The `PromptMedia` of a prompt: has the next one encoded when the prefill reaches it.

    A picture that is cached needs neither pixels nor features. Owner: the engine thread. Holds the features of one
    picture at a time.
    """

    def __init__(self, prompt: MediaPrompt, encoder: MediaEncoder) -> None:
        self.prompt = prompt
        self._encoder = encoder
        self._picture: Picture | None = None  # the one to encode, or whose features are here
        self._features: mx.array | None = None  # of that one
        self._decoding: Future[Pixels] | None = None
        self._encoding: Iterator[mx.array] | None = None

    @property
    def ready(self) -> bool:
        return self._decoding is None or self._decoding.done()

    def encode_piece(self, make_room: Callable[[int], None]) -> bool:
        assert self._picture is not None
        if self._encoding is None:
            make_room(self._encoder.needed_bytes(self._picture))
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
        span = self.prompt.next_span(position)
        if span is None or position + most <= span.start:
            return most
        if span.start > position:
            return span.start - position
        if self._picture is not span.picture:
            self.close()
            self._picture = span.picture
            self._features = self._encoder.known(span.picture)
        if self._features is None:
            return 0
        return min(most, span.stop - position) if self._encoder.splits else span.stop - position

    def forward(self, recorded: Sequence[int], at: int, count: int, layers: list[object], run: Forward) -> None:
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

    def close(self) -> None:
        if self._decoding is not None:
            self._decoding.cancel()
        self._picture = self._features = self._decoding = self._encoding = None
