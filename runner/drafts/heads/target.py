"""What a head shares with its target: the table of embeddings, the output layer, and hidden states."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

Map = Callable[[mx.array], mx.array]


class Target(NamedTuple):
    """The parts of a text model that a head uses. They stay the model's own: nothing is copied."""

    args: object
    """The arguments that its class was made from."""
    embed: Map
    """Token ids [B, L] to rows [B, L, D]."""
    unembed: Map
    """Hidden states behind the final norm, [B, L, D], to logits [B, L, V]."""
    norm: Module
    """The final norm."""


def target_of(module: Module) -> Target:
    """Returns the parts of one of mlx-lm's models."""
    text = cast("Module", getattr(module, "language_model", module))
    inner = text["model"] if "model" in text else text["backbone"]
    table = inner["embed_tokens"] if "embed_tokens" in inner else inner["embeddings"]
    return Target(
        text.args,
        cast("Map", table),
        cast("Map", text.get("lm_head", table.as_linear)),
        cast("Module", inner["norm"] if "norm" in inner else inner["norm_f"]),
    )


class Tap:
    """Keeps the hidden states behind the final norm of the last forward, while it is on. A model has one at most.

    The norm computes what it always does. Owner: the engine thread.
    """

    def __init__(self, norm: Module) -> None:
        """`norm` is the final norm of a model."""
        self.hidden: mx.array | None = None
        """Of the last forward since it was turned on, [B, L, D] (lazy)."""
        self._norm = norm
        self._plain = plain = type(norm)
        tap = self

        class TappedNorm(plain):  # type: ignore[misc, valid-type]  # the class of the norm, whichever it is
            def __call__(self, x: mx.array) -> mx.array:
                tap.hidden = hidden = plain.__call__(self, x)
                return cast("mx.array", hidden)

        self._tapped = TappedNorm

    @property
    def on(self) -> bool:
        """True if hidden states are kept."""
        return type(self._norm) is self._tapped

    def turn(self, on: bool) -> None:
        """Turns it on or off; forwards cost nothing more while it is off."""
        self._norm.__class__ = self._tapped if on else self._plain
        self.hidden = None

    def take(self) -> mx.array | None:
        """Returns the hidden states of the last forward, and forgets them."""
        hidden, self.hidden = self.hidden, None
        return hidden


# --- Follows what a target computes for one text after the other, for those that draft from it.

MOST_ROWS = 256
"""Hidden states that wait to be read. Those of a longer part of a prompt are its last ones."""

Draw = Callable[[mx.array], mx.array]
"""Maps logits [1, V] to a token, uint32 [1], lazily. It is part of the draw's own history from then on."""
Forward = Callable[[mx.array, list[object]], mx.array]


class AnyTap(Protocol):
    """Keeps hidden states of the target's last forward while it is on."""

    @property
    def on(self) -> bool: ...

    def take(self) -> mx.array | None:
        """Returns those of the last tokens, or of all of them, [B, L, D] (lazy), and forgets them."""
        ...


class _Seen(NamedTuple):
    """Hidden states of consecutive tokens of a text."""

    start: int
    hidden: mx.array  # [1, L, D]

    @property
    def stop(self) -> int:
        return self.start + self.hidden.shape[1]

    def part(self, start: int, stop: int) -> mx.array:
        return self.hidden[:, max(0, start - self.start) : stop - self.start]


class Follower(ABC):
    """Keeps the hidden states of the last tokens of one text until they are read.

    The text need not be followed from its beginning, and may go back: what the target sees later replaces what it saw.
    Owner: the engine thread.
    """

    def __init__(self, tap: AnyTap, most_rows: int) -> None:
        self._tap = tap
        self._most_rows = most_rows
        self._text: weakref.ref[object] | None = None  # a layer of the target, which stands for the text
        self._seen: list[_Seen] = []  # without a gap

    @abstractmethod
    def go_back(self, to: int) -> None:
        """The tokens of the text from `to` on are others now."""

    @abstractmethod
    def free(self) -> None:
        """Frees all but the weights, and forgets the text."""
        self._text = None
        self._seen = []

    @property
    def waiting_bytes(self) -> int:
        """The bytes of hidden states that wait."""
        return sum(seen.hidden.nbytes for seen in self._seen)

    def watch(self, forward: Forward) -> Forward:
        """Returns `forward`, the target's, which tells this follower what it sees while the tap is on."""
        return watched(forward, self._tap, self.saw)

    def saw(self, layers: Sequence[object], start: int, hidden: mx.array) -> None:
        """Takes the hidden states [1, L, D] (lazy) of the tokens from `start` on, which the target has just seen; its
        `layers` tell one answer from another. What it saw from there on before was not right."""
        layer = counting(layers)
        if layer is None:
            return
        if not self.follows(layers):
            self.free()
            self._text = weakref.ref(layer)
        self.go_back(start)
        kept = [seen if seen.stop <= start else _Seen(seen.start, seen.part(0, start)) for seen in self._seen]
        self._seen = [seen for seen in kept if seen.start < start]
        if self._seen and self._seen[-1].stop != start:
            self._seen = []
        rows = hidden.shape[1]
        if rows > self._most_rows:
            start, hidden = start + rows - self._most_rows, hidden[:, -self._most_rows :]
        if rows > 1:
            # A part of a prompt may need no logits. Not computed, it would keep keys and values of the target alive,
            # and MLX would copy them in the next forward.
            mx.async_eval(hidden)
        self._seen.append(_Seen(start, hidden))
        while self._seen[-1].stop - self._seen[0].stop >= self._most_rows:
            del self._seen[0]

    def follows(self, layers: Sequence[object]) -> bool:
        """Returns True if the layers are those of the text that is followed."""
        layer = counting(layers)
        return layer is not None and self._text is not None and self._text() is layer

    def first_waiting(self, stop: int) -> int | None:
        """Returns the place of the first token whose hidden states wait; None unless all from there to `stop` do."""
        if not self._seen or self._seen[-1].stop < stop or self._seen[0].start >= stop:
            return None
        return self._seen[0].start

    def waiting(self, start: int, stop: int) -> mx.array:
        """Returns the hidden states [1, L, D] of these tokens, which wait. Those before `stop` do not any more."""
        parts = [seen.part(start, stop) for seen in self._seen if seen.stop > start and seen.start < stop]
        self._seen = [
            seen if seen.start >= stop else _Seen(stop, seen.part(stop, seen.stop))
            for seen in self._seen
            if seen.stop > stop
        ]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def watched(forward: Forward, tap: AnyTap, saw: Callable[[Sequence[object], int, mx.array], None]) -> Forward:
    """Returns `forward`, a target's. While the tap is on, it calls `saw` with the layers of a single text, the place of
    the first token and the hidden states [1, L, D] (lazy) from there on."""

    def watching(tokens: mx.array, layers: list[object]) -> mx.array:
        if not tap.on:
            return forward(tokens, layers)
        layer = counting(layers)
        start = vars(layer)["offset"] if layer is not None else None
        logits = forward(tokens, layers)
        hidden = tap.take()
        if hidden is not None and start is not None and hidden.shape[0] == tokens.shape[0] == 1:
            saw(layers, start + tokens.shape[1] - hidden.shape[1], hidden)
        return logits

    return watching


def counting(layers: Sequence[object]) -> object | None:
    """Returns the first layer of a target that counts its tokens, which stands for the text; None if there is none."""
    return next((layer for layer in layers if isinstance(getattr(layer, "offset", None), int)), None)
