"""Computes the embeddings of waiting texts, several texts in a forward. Owner: the engine thread."""

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
"""The most tokens of a forward over several texts, padding included, in chunks of a prompt. A larger forward would be
hardly faster for each token, and other texts would wait longer."""
_LEAST_FILLED = 0.5
"""The least share of tokens that are not padding in a forward over several texts."""


class EmbeddingSizes(NamedTuple):
    """The sizes of a model's embeddings, and the memory that a forward needs."""

    full: int
    """The number of values in an embedding."""
    listed: tuple[int, ...]
    """The sizes to which an embedding may be cut. Empty if the model lists none."""
    towers: frozenset[str]
    """The kinds of media, `image` and `audio`, for which the model has a tower."""
    token_bytes: int
    """The bytes of memory that a forward needs for each token."""
    least_bytes: int
    """The bytes of memory that a forward needs besides those for its tokens."""


@dataclass(eq=False)
class TextToEmbed:
    """A text as tokens, with the tokens that begin and end every text."""

    tokens: list[int]
    shown: ShownPrompt | None = None
    """The text with its media. None for a text without media."""
    asked: object = None
    """The questions about the text, `Marks` or `Spans`, for a model that decides. None for an embedding."""
    features: list[tuple[int, int, mx.array]] = field(default_factory=list)
    """Start, stop and features [stop - start, D] of each medium, kept from its encoding until the forward begins."""
    found: "Future[list[float]]" = field(default_factory=Future)
    """The embedding or the options' scores, or a RequestError. The endpoint cancels this if the client leaves."""


class EncoderPiece(NamedTuple):
    """A part of a forward, whose arrays are not evaluated yet."""

    arrays: list[mx.array]
    """All arrays that later pieces need. In the last piece, one array: the embeddings [B, D] or scores."""
    token_layers: float
    """The work of the piece in tokens times layers. Attention to many keys counts as more. 0 for the last piece."""


class TextEncoder(Protocol):
    """A model that computes embeddings or scores."""

    @property
    def layers(self) -> Sequence[object]: ...

    def encode(self, inputs: mx.array, lengths: Sequence[int], media: Sequence[Any] = ()) -> Iterator[EncoderPiece]:
        """Builds a forward over tokens [B, L] and yields it in pieces. Row b has padding after `lengths[b]` tokens.

        `media` are (row, start, stop, features), where features replace the embeddings of tokens. A model that decides
        gets the questions about each row instead (`TextToEmbed.asked`).
        """


def choose(lengths: Sequence[int], most_tokens: int) -> list[int]:
    """Returns the indices of texts to compute in one forward, among waiting texts of these lengths (oldest first).

    Chooses the first text and texts of similar length. All padded to the longest, they have at most `most_tokens`
    tokens, and at most half of these are padding.
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
    """A text whose media are being encoded, one item at a time."""

    def __init__(self, text: TextToEmbed, media: PromptMedia) -> None:
        self.text = text
        self.media = media
        self._position = 0
        self._encodes = False  # True while some pieces of the item at `_position` are computed and some are not

    def encode_piece(self, make_room: Callable[[int], None]) -> bool:
        """Computes a piece of the next item. Returns True once the text has the features of all items. Raises the
        errors of `PromptMedia.encode_piece`."""
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
        """Moves the features out of the texts."""
        self.texts = texts
        lengths = [len(text.tokens) for text in texts]
        longest = max(lengths)
        self.padded = longest * len(texts)
        media = [(row, *each) for row, text in enumerate(texts) for each in text.features]
        tokens = [text.tokens + [0] * (longest - len(text.tokens)) for text in texts]
        for row, start, stop, _ in media:
            tokens[row][start:stop] = [0] * (stop - start)  # the embedding table may have no rows for soft tokens
            texts[row].features = []
        asked = [text.asked for text in texts if text.asked is not None]
        self._pieces = encoder.encode(mx.array(tokens), lengths, asked or media)

    @property
    def left(self) -> bool:
        """True if the clients of all texts have left."""
        return all(text.found.cancelled() for text in self.texts)

    def compute(self, token_layers: float) -> list[list[float]] | None:
        """Computes pieces until their work reaches `token_layers`. Returns the embeddings after the last piece, else
        None."""
        built: list[mx.array] = []
        while token_layers > 0 and (piece := next(self._pieces, None)) is not None:
            built += piece.arrays
            token_layers -= piece.token_layers
            if not piece.token_layers:
                mx.eval(built)
                return cast("list[list[float]]", piece.arrays[0].tolist())
        mx.eval(built)
        return None


class TextEmbedder:
    """Computes the embeddings of texts. Texts that wait at the same time are computed in one forward.

    A text longer than `_together` tokens has a forward of its own. That forward alternates with the forward of other
    texts after each piece. A piece is as much work as a slice of a prompt.
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
        """`room_bytes` is the budget without the weights. `show` returns the encoder of a text's media. Unless
        `together`, every text has a forward of its own."""
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
        """At most one forward over several texts, and one over a long text. The next piece is of the first forward."""
        self._counts = EmbeddingCounts()

    def refusal(self, tokens: int) -> str:
        """Returns the reason why this many tokens need too much memory, or an empty text. Any thread may call this."""
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
        """Computes one piece of a forward, or of a medium. An error fails only the texts of that forward or medium."""
        for each in self._showing:
            if each.text.found.cancelled():
                each.media.close()
        for text in (*(each.text for each in self._showing), *self._waiting):
            if text.found.cancelled():
                text.features = []  # the endpoint may hold the text longer
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
        """Computes a piece of a text's media. After the last piece, queues the text for a forward."""
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
        """Returns the counts so far. The object changes with later calls."""
        self._counts.waiting = (
            len(self._waiting) + len(self._showing) + sum(len(forward.texts) for forward in self._running)
        )
        return self._counts

    def warm_up(self, text: TextToEmbed) -> None:
        """Computes `text` once, before the first request. Raises ComputeError if the model raises an error."""
        try:
            found = _Forward(self._encoder, [text]).compute(float("inf"))
        except Exception as error:
            raise ComputeError(f"the model cannot compute: {exception_line(error)}") from error
        mx.clear_cache()
        if not all(map(_are_numbers, found or ())):
            log.warning("texts may fail", why=NO_NUMBERS)

    def _begin(self) -> None:
        """Begins a forward over several texts, and one over a long text, unless a forward of that kind is running."""
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
    """Returns False if any value is NaN or infinite, since then the sum of the values is, too."""
    return isfinite(sum(values))


def _refuse(text: TextToEmbed, error: RequestError) -> None:
    text.features = []  # before the waiting thread learns of it: arrays are freed on the engine thread
    if text.found.set_running_or_notify_cancel():
        text.found.set_exception(error)
