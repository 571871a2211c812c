"""Drafts with a head: the tokens of one answer after the other."""

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import mlx.core as mx

from mlx_lm.models.cache import KVCache  # isort: skip  # head.py has registered mlx_lm

from runner.model.heads.head import Head
from runner.model.heads.target import Tap

MOST_ROWS = 256
"""Hidden states that wait to be read. Those of a longer part of a prompt are its last ones."""
MOST_SLOTS = 4096
"""With more than these the layers of the head begin again, so they stay small, however long the text."""

Draw = Callable[[mx.array], mx.array]
"""Maps logits [1, V] to a token, uint32 [1], lazily. It is part of the draw's own history from then on."""


class _Seen(NamedTuple):
    """Hidden states of consecutive tokens of a text."""

    start: int
    hidden: mx.array  # [1, L, D]

    @property
    def stop(self) -> int:
        return self.start + self.hidden.shape[1]

    def part(self, start: int, stop: int) -> mx.array:
        return self.hidden[:, start - self.start : stop - self.start]


class HeadDrafter:
    """Follows the text of one answer, and drafts behind it.

    Slot i of the head's layers stands for token i, of which the target has computed the hidden state, and the token
    behind it; the logits of the slot are those of the token after that. Only tokens that are certain stay in the
    layers. The text need not be followed from its beginning: drafts get worse, answers never.

        forward = drafter.watch(loaded.logits)      # in place of it, from the first forward of an answer on
        ...
        drafts = drafter.propose(layers, position, recorded, most, sampler.preview())

    Owner: the engine thread.
    """

    def __init__(self, head: Head, most_rows: int = MOST_ROWS, most_slots: int = MOST_SLOTS) -> None:
        self.tap = Tap(head.target.norm)
        """It must be on while an answer that may be drafted is computed."""
        self._head = head
        self._most_rows = most_rows
        self._most_slots = most_slots
        self._text: weakref.ref[object] | None = None  # a layer of the target, which stands for the text
        self._seen: list[_Seen] = []  # hidden states, from `_at` on
        self._layers: list[KVCache] = []
        self._at = 0  # the slot that comes next
        self._slots = 0  # in the layers
        self._last: mx.array | None = None  # the states of the slot before `_at`, [1, 1, D]

    @property
    def nbytes(self) -> int:
        """The bytes of all but the weights."""
        layers = sum(cast("int", layer.nbytes) for layer in self._layers)
        return layers + sum(seen.hidden.nbytes for seen in self._seen)

    def watch(
        self, forward: Callable[[mx.array, list[object]], mx.array]
    ) -> Callable[[mx.array, list[object]], mx.array]:
        """Returns `forward`, the target's, which tells this drafter what it sees while the tap is on."""

        def watched(tokens: mx.array, layers: list[object]) -> mx.array:
            if not self.tap.on:
                return forward(tokens, layers)
            counting = _counting(layers)
            start = vars(counting)["offset"] if counting is not None else None
            logits = forward(tokens, layers)
            hidden = self.tap.take()
            if hidden is not None and start is not None and hidden.shape[:2] == tokens.shape == (1, tokens.shape[1]):
                self.saw(layers, start, hidden)
            return logits

        return watched

    def saw(self, layers: Sequence[object], start: int, hidden: mx.array) -> None:
        """Takes the hidden states [1, L, D] (lazy) of the tokens from `start` on, which the target has just seen; its
        `layers` tell one answer from another. What it saw from there on before was not right."""
        counting = _counting(layers)
        if counting is None:
            return
        if not self._follows(counting):
            self.free()
            self._text = weakref.ref(counting)
        if start < self._at:
            self._begin(0)
        kept = [seen if seen.stop <= start else _Seen(seen.start, seen.part(seen.start, start)) for seen in self._seen]
        self._seen = [seen for seen in kept if seen.hidden.shape[1] > 0]
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

    def propose(
        self, layers: Sequence[object], position: int, recorded: Sequence[int], most: int, draw: Draw
    ) -> list[int]:
        """Returns `most` tokens that may follow the `recorded` ones, of which the target has seen the first `position`:
        all but the last one; none if too little is known of the text. Waits for them once."""
        counting = _counting(layers)
        if counting is None or not self._follows(counting) or most < 1 or len(recorded) != position + 1:
            return []
        states = self._read(position, recorded)
        if states is None:
            return []
        drafts = [draw(self._head.logits(states)[:, -1])]
        for _ in range(most - 1):
            mx.async_eval(drafts[-1])
            states = self._head.states(states, drafts[-1][:, None], self._layers)
            drafts.append(draw(self._head.logits(states)[:, -1]))
        for layer in self._layers:
            layer.trim(most - 1)
        return cast("list[int]", mx.concatenate(drafts).tolist())

    def free(self) -> None:
        """Frees all but the weights, and forgets the text."""
        self._text = None
        self._seen = []
        self._begin(0)

    def _follows(self, counting: object) -> bool:
        return self._text is not None and self._text() is counting

    def _begin(self, at: int) -> None:
        self._layers, self._at, self._slots, self._last = [], at, 0, None

    def _read(self, position: int, recorded: Sequence[int]) -> mx.array | None:
        """Reads what the target has seen, up to `position`. Returns the states of the last slot, [1, 1, D]; None if
        they are not known."""
        if position == self._at:
            return self._last
        if not self._seen or self._seen[-1].stop < position or self._seen[0].start >= position:
            return None
        start = max(self._at, self._seen[0].start)
        pictures = [place for place in range(start, position) if recorded[place + 1] < 0]
        if pictures:
            start = pictures[-1] + 1
        if start != self._at or not self._layers or self._slots + position - start > self._most_slots:
            self._begin(start)
            self._layers = self._head.make_layers()
        if start == position:
            return None
        parts = [
            seen.part(max(start, seen.start), min(position, seen.stop)) for seen in self._seen if seen.stop > start
        ]
        hidden = mx.concatenate([part for part in parts if part.shape[1]], axis=1)
        states = self._head.states(hidden, mx.array([recorded[start + 1 : position + 1]]), self._layers)
        self._slots += position - start
        self._at, self._last, self._seen = position, states[:, -1:], []
        return self._last


def _counting(layers: Sequence[object]) -> object | None:
    """Returns the first layer of a target that counts its tokens; None if there is none."""
    return next((layer for layer in layers if isinstance(getattr(layer, "offset", None), int)), None)
