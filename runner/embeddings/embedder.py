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
"""The most chunks of a prompt in a forward over several texts, including padding: larger products are hardly quicker,
and other texts wait for them."""
_LEAST_FILLED = 0.5
"""The least part of a forward over several texts that is not padding."""


class EmbeddingSizes(NamedTuple):
    """The sizes of a model's embeddings, and of the memory that computing them takes."""

    full: int
    """The numbers of an embedding."""
    listed: tuple[int, ...]
    """The sizes to which an embedding may be cut; empty if the model names none."""
    towers: frozenset[str]
    """The kinds of media, `image` and `audio`, for which the model has a tower."""
    token_bytes: int
    """The memory that computing takes for each token of a text."""
    least_bytes: int
    """The memory that computing takes for any text."""


@dataclass(eq=False)
class TextToEmbed:
    """A text as tokens, including those that begin and end it."""

    tokens: list[int]
    shown: ShownPrompt | None = None
    """The same text, with its media."""
    asked: object = None
    """The question about the text, in the form of a model that decides; None for an embedding."""
    features: list[tuple[int, int, mx.array]] = field(default_factory=list)
    """Start, stop and features [stop - start, D] of each of its media, between their encoding and the forward."""
    found: "Future[list[float]]" = field(default_factory=Future)
    """The embedding, or the scores of the options; a RequestError if they cannot be computed. The client cancels it
    when it leaves."""


class EncoderPiece(NamedTuple):
    """A part of a forward that is built, not computed."""

    arrays: list[mx.array]
    """All arrays that later pieces need; in the last piece, only the embeddings [B, D]."""
    token_layers: float
    """The work in tokens times layers; attention to many keys counts as more. 0 for the last piece."""


class TextEncoder(Protocol):
    """A model that makes embeddings, or scores."""

    @property
    def layers(self) -> Sequence[object]: ...

    def encode(self, inputs: mx.array, lengths: Sequence[int], media: Sequence[Any] = ()) -> Iterator[EncoderPiece]:
        """Builds a forward over tokens [B, L], each row padded after its own length. Yields it in pieces.

        `media` are features in the places of tokens: row, start, stop, features; for a model that decides, the question
        about each row.
        """


def choose(lengths: Sequence[int], most_tokens: int) -> list[int]:
    """Returns the indices of the texts to compute together, among texts of these lengths that wait in this order.

    Takes the first text and others of similar length. Padded to the longest they have at most `most_tokens` tokens, at
    most half of them padding.
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
        self._position = 0
        self._encodes = False  # True between two pieces of the item at the position

    def encode_piece(self, make_room: Callable[[int], None]) -> bool:
        """Computes a piece of the next item. Returns True when the text has the features of all items. Raises as
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
            for start, stop, rows in self.media.features(at, count):
                self.text.features.append((at + start, at + stop, rows))
            self._position += count
        self.media.close()
        return True


class _Forward:
    """One forward over some texts, in pieces."""

    def __init__(self, encoder: TextEncoder, texts: Sequence[TextToEmbed]) -> None:
        """Takes the features from the texts."""
        self.texts = texts
        lengths = [len(text.tokens) for text in texts]
        longest = max(lengths)
        self.padded = longest * len(texts)
        media = [(row, *each) for row, text in enumerate(texts) for each in text.features]
        tokens = [text.tokens + [0] * (longest - len(text.tokens)) for text in texts]
        for row, start, stop, _ in media:
            tokens[row][start:stop] = [0] * (stop - start)  # soft tokens may lie beyond the table
            texts[row].features = []
        asked = [text.asked for text in texts if text.asked is not None]
        self._pieces = encoder.encode(mx.array(tokens), lengths, asked or media)

    @property
    def left(self) -> bool:
        """True if all clients have left."""
        return all(text.found.cancelled() for text in self.texts)

    def compute(self, token_layers: float) -> list[list[float]] | None:
        """Computes the next pieces, about as much work as `token_layers`. Returns the embeddings after the last piece,
        else None."""
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
    """Computes the embeddings of texts; texts that wait at the same time are computed together.

    A text longer than `_together` tokens is computed alone, and other texts take turns with it, piece by piece. A piece
    is as much work as a slice of a prompt.
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
        """`room_bytes` is the budget without the weights. `show` begins the encoding of a text's media. Without
        `together` every text has a forward of its own."""
        self.sizes = sizes
        self._encoder = encoder
        self._room_bytes = room_bytes
        self._piece = chunk_tokens * len(encoder.layers)
        self._together = min(_MOST_TOGETHER, _CHUNKS_TOGETHER * chunk_tokens) if together else 0
        self._show = show
        self._showing: list[_Showing] = []
        """Texts whose media are not encoded yet, the oldest first."""
        self._shows_next = True
        self._waiting: list[TextToEmbed] = []
        self._running: list[_Forward] = []
        """At most one forward over several texts and one over a long text. The first computes the next piece."""
        self._counts = EmbeddingCounts()

    def refusal(self, tokens: int) -> str:
        """Returns the reason why a text of this many tokens cannot be computed, or an empty text. Any thread may call
        this."""
        needed = self.sizes.least_bytes + tokens * self.sizes.token_bytes
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

    def pending(self, *, idle: bool = True) -> bool:  # noqa: ARG002 - the same when idle
        """Returns True if there is something to compute."""
        return bool(self._waiting or self._running or any(each.media.ready for each in self._showing))

    def advance(self, **_: object) -> None:
        """Computes one piece of a forward, or of a medium. An error ends only the texts of that forward."""
        for each in self._showing:
            if each.text.found.cancelled():
                each.media.close()
        self._showing = [each for each in self._showing if not each.text.found.cancelled()]
        self._waiting = [text for text in self._waiting if not text.found.cancelled()]
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
            embeddings = forward.compute(self._piece)
        except Exception as error:
            self._fail(forward.texts, error)
        else:
            if embeddings is None:
                self._running.append(forward)
            else:
                self._answer(forward, embeddings)
        self._counts.seconds += perf_counter() - started

    def _show_piece(self, showing: _Showing) -> None:
        """Computes a piece of a text's media. After the last piece the text waits for a forward."""
        try:
            done = showing.encode_piece(self._make_room)
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
            found = _Forward(self._encoder, [text]).compute(float("inf"))
        except Exception as error:
            raise ComputeError(f"the model cannot compute: {exception_line(error)}") from error
        mx.clear_cache()
        if not all(map(_are_numbers, found or ())):
            log.warning("texts may fail", why=NO_NUMBERS)

    def _begin(self) -> None:
        """Begins a forward over several texts, and one over a long text, unless one of its kind runs."""
        for alone in (False, True):
            if any((forward.padded > self._together) == alone for forward in self._running):
                continue
            queue = [text for text in self._waiting if (len(text.tokens) > self._together) == alone]
            if queue:
                count = [len(text.tokens) for text in queue]
                texts = queue[:1] if alone else [queue[index] for index in choose(count, self._together)]
                self._waiting = [text for text in self._waiting if text not in texts]
                self._running.append(_Forward(self._encoder, texts))

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
    """Returns False if any value is NaN or infinite, since then the sum is."""
    return isfinite(sum(values))


def _refuse(text: TextToEmbed, error: RequestError) -> None:
    if text.found.set_running_or_notify_cancel():
        text.found.set_exception(error)
