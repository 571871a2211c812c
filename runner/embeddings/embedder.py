"""Texts that wait for their embeddings, and the forwards over them. Owner: the engine thread."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from http import HTTPStatus
from math import isfinite
from time import perf_counter
from typing import Any, NamedTuple, Protocol, cast

import mlx.core as mx

from protocol.stats import EmbeddingCounts
from runner.engine.generation import NoMedia
from runner.engine.ports import PromptMedia
from runner.engine.request import ShownPrompt
from runner.errors import NO_NUMBERS, ComputeError, RequestError
from runner.logs import Log, exception_line
from runner.sizes import sized

log = Log(__name__)

_MOST_TOGETHER = 4096
_CHUNKS_TOGETHER = 8
"""Chunks of a prompt that a forward over several texts may have in all, with their padding: larger products are hardly
quicker, and the next texts wait for all of it."""
_LEAST_FILLED = 0.5
"""Of a forward over several texts: the part that is not padding."""


class EmbeddingSizes(NamedTuple):
    """The sizes of a model's embeddings, and of the memory that computing them takes. Any thread may read it."""

    full: int
    """The numbers of an embedding."""
    listed: tuple[int, ...]
    """The sizes to which it may be cut; empty if the model names none."""
    towers: frozenset[str]
    """The kinds of media, `image` and `audio`, for which the model has a tower."""
    token_bytes: int
    """The bytes that computing takes for each token of a text."""
    least_bytes: int
    """The bytes that it takes beside these."""

    def work_bytes(self, tokens: int) -> int:
        """Returns about the bytes that computing the embedding of a text of this many tokens takes."""
        return self.least_bytes + tokens * self.token_bytes


@dataclass(eq=False)
class TextToEmbed:
    """A text, as tokens with those that begin and end it. Made off the engine thread; whoever waits may cancel it."""

    tokens: list[int]
    shown: ShownPrompt | None = None
    """The same text, with its media."""
    asked: object = None
    """The question about the text, in the form of a model that decides; None for its embedding."""
    found: "Future[list[float]]" = field(default_factory=Future)
    """Its embedding, or the scores of its options. Raises RequestError if it cannot be computed."""


Features = dict[TextToEmbed, list[tuple[int, int, mx.array]]]
"""Text -> start, stop and features [stop - start, D] of each of its media."""


class EncoderPiece(NamedTuple):
    """A part of a forward, as an encoder builds it."""

    arrays: list[mx.array]
    """All arrays that the rest is computed from; of the last piece, the embeddings [B, D] alone."""
    token_layers: float
    """The work, in tokens times layers; attention to many keys counts as more. 0 for the last piece."""


class TextEncoder(Protocol):
    """The model."""

    @property
    def layers(self) -> Sequence[object]: ...

    def encode(self, inputs: mx.array, lengths: Sequence[int], media: Sequence[Any] = ()) -> Iterator[EncoderPiece]:
        """Builds a forward over tokens [B, L], each row padded after its own length. Yields it in pieces.

        `media` are features in the places of tokens: row, start, stop, features. A model that decides gets the question
        about each row instead.
        """


def choose(lengths: Sequence[int], most_tokens: int) -> list[int]:
    """Returns the indices of the texts to compute together, among texts of these lengths that wait in this order.

    The first one is among them, and others whose lengths are near its own: padded to the longest of them, they have at
    most `most_tokens`, of which at least half are no padding.
    """
    chosen, longest, filled = [0], lengths[0], lengths[0]
    others = sorted(range(1, len(lengths)), key=lambda index: (abs(lengths[index] - lengths[0]), index))
    for index in others:
        length = max(longest, lengths[index])
        padded = length * (len(chosen) + 1)
        if padded > most_tokens or filled + lengths[index] < _LEAST_FILLED * padded:
            continue
        chosen.append(index)
        longest, filled = length, filled + lengths[index]
    return sorted(chosen)


class _Showing:
    """A text whose media are being encoded, one after the other."""

    def __init__(self, text: TextToEmbed, media: PromptMedia) -> None:
        self.text = text
        self.media = media
        self.features: list[tuple[int, int, mx.array]] = []
        self._position = 0
        self._encodes = False  # the item at the position

    def advance(self, make_room: Callable[[int], None]) -> bool:
        """Computes a piece of the next item. Returns True when the features of all items are there. Raises as
        `PromptMedia.encode_piece` does."""
        length = len(self.text.tokens)
        while self._position < length:
            at = self._position
            count = 0 if self._encodes else self.media.slice_tokens(at, length - at)
            if not count:
                self._encodes = not self.media.encode_piece(make_room)
                if self._encodes:
                    return False
                continue
            self.features += [(at + start, at + stop, rows) for start, stop, rows in self.media.features(at, count)]
            self._position += count
        self.media.close()
        return True


class _Forward:
    """One forward over some texts, in pieces."""

    def __init__(self, encoder: TextEncoder, texts: Sequence[TextToEmbed], features: Features) -> None:
        """`features` has those of the texts that show media, and loses them."""
        self.texts = texts
        lengths = [len(text.tokens) for text in texts]
        longest = max(lengths)
        self.padded = longest * len(texts)
        media = [(row, *each) for row, text in enumerate(texts) for each in features.pop(text, ())]
        tokens = [text.tokens + [0] * (longest - len(text.tokens)) for text in texts]
        for row, start, stop, _ in media:
            tokens[row][start:stop] = [0] * (stop - start)  # soft tokens may be beyond the table
        asked = [text.asked for text in texts if text.asked is not None]
        self._pieces = encoder.encode(mx.array(tokens), lengths, asked or media)

    @property
    def left(self) -> bool:
        """True if no client waits for it any more."""
        return all(text.found.cancelled() for text in self.texts)

    def advance(self, token_layers: float) -> list[list[float]] | None:
        """Computes pieces that are this much work together, or one that is more. Returns the embeddings after the last
        one, else None."""
        built: list[mx.array] = []
        last: EncoderPiece | None = None
        while token_layers > 0 and (piece := next(self._pieces, None)) is not None:
            built += piece.arrays
            token_layers -= piece.token_layers
            last = piece
            if not piece.token_layers:
                mx.eval(built)
                return cast("list[list[float]]", last.arrays[0].tolist())
        mx.eval(built)
        return None


class TextEmbedder:
    """Computes the embeddings of texts, those together that wait together.

    A text that is longer than a forward over several may be is computed alone. While it is, others take turns with it,
    piece by piece: a piece is as much work as a slice of a prompt.
    """

    name = "embed"

    def __init__(
        self,
        encoder: TextEncoder,
        sizes: EmbeddingSizes,
        chunk_tokens: int,
        room_bytes: int,
        show: Callable[[ShownPrompt], PromptMedia] = lambda _: NoMedia(),
        *,
        together: bool = True,
    ) -> None:
        """`room_bytes` is the budget without the weights. `show` begins with the media of one text. Without
        `together` every text has a forward of its own."""
        self.sizes = sizes
        self._encoder = encoder
        self._room_bytes = room_bytes
        self._piece = chunk_tokens * len(encoder.layers)
        self._together = min(_MOST_TOGETHER, _CHUNKS_TOGETHER * chunk_tokens) if together else 0
        self._show = show
        self._showing: list[_Showing] = []
        """Texts whose media are not encoded yet, the oldest first."""
        self._features: Features = {}
        """Those of texts that wait."""
        self._shows_next = True
        self._waiting: list[TextToEmbed] = []
        self._running: list[_Forward] = []
        """At most one over several texts, and one over a long one. The first one has the next piece."""
        self._counts = EmbeddingCounts()

    def refusal(self, tokens: int) -> str:
        """Returns the reason why a text of this many tokens cannot be computed; empty if it can. Any thread may call
        this."""
        needed = self.sizes.work_bytes(tokens)
        if needed <= self._room_bytes:
            return ""
        return (
            f"embedding request would allocate {needed} bytes (budget {max(0, self._room_bytes)}); reduce input length"
            " or parallel load"
        )

    def add_text(self, text: TextToEmbed) -> None:
        """Queues a text."""
        if text.shown is None:
            self._waiting.append(text)
        else:
            self._showing.append(_Showing(text, self._show(text.shown)))

    def pending(self, *, idle: bool = True) -> bool:  # noqa: ARG002 - it has work or not
        """Returns True if there is something to compute."""
        return bool(self._waiting or self._running or any(each.media.ready for each in self._showing))

    def advance(self, **_: object) -> None:
        """Computes one piece of one forward, or of a medium. An error ends the texts of that forward alone."""
        for each in self._showing:
            if each.text.found.cancelled():
                each.media.close()
        self._showing = [each for each in self._showing if not each.text.found.cancelled()]
        self._waiting = [text for text in self._waiting if not text.found.cancelled()]
        self._features = {text: each for text, each in self._features.items() if not text.found.cancelled()}
        self._running = [forward for forward in self._running if not forward.left]
        self._begin()
        showing = next((each for each in self._showing if each.media.ready), None)
        started = perf_counter()
        if showing is not None and (self._shows_next or not self._running):
            self._shows_next = False
            self._show_piece(showing)
            self._counts.seconds += perf_counter() - started
            return
        self._shows_next = True
        if not self._running:
            return
        forward = self._running.pop(0)
        try:
            embeddings = forward.advance(self._piece)
        except Exception as error:
            self._fail(forward.texts, error)
        else:
            if embeddings is None:
                self._running.append(forward)
            else:
                self._answer(forward, embeddings)
        self._counts.seconds += perf_counter() - started

    def _show_piece(self, showing: _Showing) -> None:
        """Computes a piece of a text's media. With the last one the text begins to wait for a forward."""
        try:
            done = showing.advance(self._make_room)
        except Exception as error:
            self._showing.remove(showing)
            showing.media.close()
            if isinstance(error, RequestError):
                _refuse(showing.text, error)
            else:
                self._fail([showing.text], error)
            return
        if done:
            self._showing.remove(showing)
            self._features[showing.text] = showing.features
            self._waiting.append(showing.text)

    def _make_room(self, nbytes: int) -> None:
        if nbytes > self._room_bytes:
            raise RequestError(
                f"there is no room to encode a picture or a sound: that takes about {sized(nbytes)}, and the model"
                f" leaves {sized(max(0, self._room_bytes))} of the budget. Send a smaller one, or give the runner more"
                " (--memory)"
            )

    def counts(self) -> EmbeddingCounts:
        """Returns the numbers so far."""
        self._counts.waiting = (
            len(self._waiting) + len(self._showing) + sum(len(forward.texts) for forward in self._running)
        )
        return self._counts

    def warm_up(self, text: TextToEmbed) -> None:
        """Computes a short text. Raises ComputeError if the model cannot compute."""
        try:
            found = _Forward(self._encoder, [text], {}).advance(float("inf"))
        except Exception as error:
            raise ComputeError(f"the model cannot compute: {exception_line(error)}") from error
        mx.clear_cache()
        if not all(map(_are_numbers, found or ())):
            log.warning("texts may fail", why=NO_NUMBERS)

    def _begin(self) -> None:
        """Begins a forward of each kind that has texts waiting and none running."""
        for alone in (False, True):
            if any((forward.padded > self._together) == alone for forward in self._running):
                continue
            queue = [text for text in self._waiting if (len(text.tokens) > self._together) == alone]
            if queue:
                count = [len(text.tokens) for text in queue]
                texts = queue[:1] if alone else [queue[index] for index in choose(count, self._together)]
                self._waiting = [text for text in self._waiting if text not in texts]
                self._running.append(_Forward(self._encoder, texts, self._features))

    def _answer(self, forward: _Forward, embeddings: Sequence[list[float]]) -> None:
        counts = self._counts
        counts.forwards += 1
        counts.texts += len(forward.texts)
        counts.tokens += sum(len(text.tokens) for text in forward.texts)
        counts.padding += forward.padded - sum(len(text.tokens) for text in forward.texts)
        for text, embedding in zip(forward.texts, embeddings, strict=True):
            if not _are_numbers(embedding):
                log.warning("a text has no embedding", why=NO_NUMBERS)
                _refuse(text, RequestError(NO_NUMBERS, HTTPStatus.INTERNAL_SERVER_ERROR))
            elif text.found.set_running_or_notify_cancel():
                text.found.set_result(embedding)

    def _fail(self, texts: Sequence[TextToEmbed], error: Exception) -> None:
        log.exception("texts could not be embedded", texts=len(texts))
        for text in texts:
            _refuse(text, RequestError(exception_line(error), HTTPStatus.INTERNAL_SERVER_ERROR))
        mx.clear_cache()


def _are_numbers(values: Sequence[float]) -> bool:
    """Returns False if one is NaN or infinite, and so is the sum."""
    return isfinite(sum(values))


def _refuse(text: TextToEmbed, error: RequestError) -> None:
    if text.found.set_running_or_notify_cancel():
        text.found.set_exception(error)
