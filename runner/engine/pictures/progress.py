"""The pictures of one request, on their way into its prompt."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import mlx.core as mx

from runner.engine.pictures.encoder import PictureEncoder
from runner.media.prompt import Picture, PicturePrompt
from runner.model.pictures.embedding import Rows

if TYPE_CHECKING:
    from runner.media.geometry import Pixels

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
