"""Encodes media: another process makes rows, and a tower on the engine thread makes features of them, in pieces."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import NamedTuple, Protocol

import mlx.core as mx

from protocol.stats import MediaCounts
from runner.engine.generation import Forward
from runner.engine.ports import Shifted
from runner.engine.request import ShownPrompt
from runner.media.forward import FeatureRows
from runner.media.prompt import Item, MediaPrompt, Picture, Sound
from runner.media.row_store import MediaRows, RowStore
from runner.media.towers.tower import Grid, SoundTower, Tower

MOST_FEATURE_BYTES = 64 << 20
"""The most bytes of features that an encoder keeps. They serve prompts whose keys and values were evicted."""


class Towers(Protocol):
    """The towers of a model."""

    def needed_bytes(self, item: Item) -> int:
        """Returns an estimate of the most memory, in bytes, that encoding `item` needs at any moment."""

    def parts(self, item: Item, rows: MediaRows) -> Iterator[mx.array]:
        """Yields lazy arrays, which the caller evaluates in turn. The last array is the features [tokens, width]."""


class OwnTowers(NamedTuple):
    tower: Tower | None
    sound_tower: SoundTower | None = None

    def needed_bytes(self, item: Item) -> int:
        if isinstance(item, Sound):
            assert self.sound_tower is not None
            return self.sound_tower.encode_bytes(_lengths(item))
        assert self.tower is not None
        return self.tower.encode_bytes(_grid(item))

    def parts(self, item: Item, rows: MediaRows) -> Iterator[mx.array]:
        array = mx.array(rows)
        if isinstance(item, Sound):
            assert self.sound_tower is not None
            return self.sound_tower.encode(array, _lengths(item))
        assert self.tower is not None
        return self.tower.encode(array, _grid(item))


class PromptForward(Protocol):
    """The interface of `MediaForward`: forwards over a prompt with media."""

    def __call__(
        self,
        tokens: Sequence[int],
        layers: list[object],
        rows: Sequence[FeatureRows],
        positions: Sequence[Sequence[int]] | None,
        forward: Forward,
    ) -> mx.array: ...

    @property
    def shifted(self) -> Shifted: ...


class MediaEncoder:
    """The towers of a model, and the features of the items encoded last. Owner: the engine thread."""

    def __init__(
        self, towers: Towers, store: RowStore, forward: PromptForward, wake: Callable[[], None], *, splits: bool
    ) -> None:
        """`wake` is called on another thread when the rows of an item are ready. A forward may always end between two
        soft tokens of a sound; with `splits`, also between two of a picture."""
        self.towers = towers
        self.forward = forward
        self.splits = splits
        self._encoded = self._soft_tokens = self._hits = 0
        self._encode_s = 0.0
        self._store = store
        self._wake = wake
        self._features: OrderedDict[int, mx.array] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """The bytes of the kept features."""
        return sum(each.nbytes for each in self._features.values())

    def begin(self, prompt: ShownPrompt) -> "MediaProgress":
        """Returns the `PromptMedia` of one prompt, of which no item is encoded yet."""
        assert isinstance(prompt, MediaPrompt)
        return MediaProgress(prompt, self)

    def counts(self) -> MediaCounts:
        return MediaCounts(
            encoded=self._encoded,
            soft_tokens=self._soft_tokens,
            encode_s=self._encode_s,
            feature_hits=self._hits,
            feature_bytes=self.nbytes,
            row_bytes=self._store.held_bytes,
        )

    def known(self, item: Item) -> mx.array | None:
        """Returns the kept features [tokens, width] of an item; None if none are kept."""
        found = self._features.get(item.name)
        if found is not None:
            self._features.move_to_end(item.name)
            self._hits += 1
        return found

    def keep(self, item: Item, features: mx.array) -> None:
        """Keeps features for later prompts. Drops the least recently used ones beyond MOST_FEATURE_BYTES."""
        self._features[item.name] = features
        self._features.move_to_end(item.name)
        while self._features and self.nbytes > MOST_FEATURE_BYTES:
            self._features.popitem(last=False)

    def clear(self) -> None:
        self._features.clear()

    def decode(self, item: Item, left: Callable[[], bool]) -> Future[MediaRows]:
        """Returns the rows of an item, kept or newly decoded by another process. Decoding ends once `left` is True."""
        decoding = self._store.rows(item, left)
        if not decoding.done():
            decoding.add_done_callback(lambda _: self._wake())
        return decoding

    def encode(self, item: Item, rows: MediaRows) -> Iterator[mx.array]:
        """Computes the features of an item. Yields evaluated arrays; the last array is the features."""
        for part in self.towers.parts(item, rows):
            started = perf_counter()
            mx.eval(part)
            self._encode_s += perf_counter() - started
            yield part
        self._encoded += 1
        self._soft_tokens += item.tokens


def _grid(item: Item) -> Grid:
    assert isinstance(item, Picture)
    return Grid(item.geometry.rows, item.geometry.columns)


def _lengths(item: Sound) -> Sequence[int]:
    assert item.clip is not None
    return item.clip.rows


class MediaProgress:
    """The `PromptMedia` of a prompt. Encodes an item when the prefill reaches its soft tokens, so a cached item is not
    encoded. Holds the features of one item at a time. Owner: the engine thread."""

    def __init__(self, prompt: MediaPrompt, encoder: MediaEncoder) -> None:
        self.prompt = prompt
        self._encoder = encoder
        self._item: Item | None = None  # the item that is being encoded, or was encoded last
        self._features: mx.array | None = None  # the last array that the tower made of `_item`
        self._decoding: Future[MediaRows] | None = None
        self._encoding: Iterator[mx.array] | None = None

    @property
    def ready(self) -> bool:
        return self._decoding is None or self._decoding.done()

    def encode_piece(self, make_room: Callable[[int], None]) -> bool:
        assert self._item is not None
        if self._encoding is None:
            make_room(self._encoder.towers.needed_bytes(self._item))
        if self._decoding is None:
            item = self._item
            self._decoding = self._encoder.decode(item, lambda: self._item is not item)
            return False
        if self._encoding is None:
            self._encoding = self._encoder.encode(self._item, self._decoding.result())
        for self._features in self._encoding:  # noqa: B020 - the attribute keeps the last array
            return False
        assert self._features is not None
        self._encoder.keep(self._item, self._features)
        self._encoding = self._decoding = None
        return True

    def slice_tokens(self, position: int, most: int) -> int:
        span = self.prompt.next_span(position)
        if span is None or position + most <= span.start:
            return most
        if span.start > position:
            return span.start - position
        if self._item is not span.item:
            self.close()
            self._item = span.item
            self._features = self._encoder.known(span.item)
        if self._features is None:
            return 0
        splits = self._encoder.splits or isinstance(span.item, Sound)
        return min(most, span.stop - position) if splits else span.stop - position

    def features(self, at: int, count: int) -> Sequence[tuple[int, int, mx.array]]:
        return [each[:3] for each in self._rows(at, count)]

    def forward(self, recorded: Sequence[int], at: int, count: int, layers: list[object], run: Forward) -> None:
        rows, tokens = self._rows(at, count), recorded[at : at + count]
        self._encoder.forward(tokens, layers, rows, self.prompt.positions(at, at + count), run)

    def _rows(self, at: int, count: int) -> list[FeatureRows]:
        """Returns the features for the `count` tokens from `at` on. Frees an item's features after its last token."""
        stop, rows = at + count, list[FeatureRows]()
        span = self.prompt.next_span(at)
        if span is not None and span.start < stop:
            assert self._features is not None
            first, last = max(at, span.start), min(stop, span.stop)
            features = self._features[first - span.start : last - span.start]
            rows = [FeatureRows(first - at, last - at, features, isinstance(span.item, Sound))]
            following = self.prompt.next_span(stop)
            if following is None or following.item is not span.item:
                self.close()
        return rows

    def close(self) -> None:
        if self._decoding is not None:
            self._decoding.cancel()
        self._item = self._features = self._decoding = self._encoding = None
