"""Drafts with an assistant: the tokens of one answer after the other."""

import weakref
from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from runner.drafts.assistant.load import Assistant, read
from runner.drafts.heads.target import Draw, Forward, Tap, counting, watched


class AssistantDrafter:
    """Drafts behind the last token of an answer, from the hidden state before it and what the target's layers hold.

    Everything is seen from the last place that the target has computed, however many tokens are drafted: that is how
    assistants are trained. Nothing is kept but the hidden states of the last forward.

        forward = drafter.watch(loaded.logits)      # in place of it
        ...
        drafts = drafter.propose(layers, position, recorded, most, sampler.preview())

    Owner: the engine thread.
    """

    def __init__(self, assistant: Assistant) -> None:
        self.tap = Tap(assistant.target.norm)
        """It must be on during the last forward before drafts."""
        self._assistant = assistant
        self._text: weakref.ref[object] | None = None  # a layer of the target, which stands for the text
        self._start = 0  # the place of the first hidden state
        self._hidden: mx.array | None = None  # [1, L, D]

    @property
    def nbytes(self) -> int:
        """The bytes of all but the weights."""
        return 0 if self._hidden is None else self._hidden.nbytes

    def watch(self, forward: Forward) -> Forward:
        """Returns `forward`, the target's, which tells this drafter what it sees while the tap is on."""
        return watched(forward, self.tap, self.saw)

    def saw(self, layers: Sequence[object], start: int, hidden: mx.array) -> None:
        """Takes the hidden states [1, L, D] (lazy) of the tokens from `start` on, which the target has just seen; its
        `layers` tell one answer from another."""
        layer = counting(layers)
        if layer is None:
            return
        if hidden.shape[1] > 1:
            mx.async_eval(hidden)  # see `Follower.saw`
        self._text, self._start, self._hidden = weakref.ref(layer), start, hidden

    def propose(
        self, layers: Sequence[object], position: int, recorded: Sequence[int], most: int, draw: Draw
    ) -> list[int]:
        """Returns `most` tokens that may follow the `recorded` ones, of which the target has seen the first `position`:
        all but the last one; none if the target's last forward was not over them. Waits for them once."""
        before = self._before(layers, position)
        if before is None or most < 1 or len(recorded) != position + 1 or recorded[-1] < 0:
            return []
        shared = read(self._assistant.places, self._assistant.kinds, layers, position)
        if shared is None:
            return []
        drafts: list[mx.array] = []
        tokens = mx.array([[recorded[-1]]])
        for _ in range(most):
            logits, before = self._assistant.step(tokens, before, shared, position - 1)
            drafts.append(draw(logits[:, -1]))
            tokens = drafts[-1][:, None]
            mx.async_eval(tokens)
        return cast("list[int]", mx.concatenate(drafts).tolist())

    def free(self) -> None:
        """Frees all but the weights, and forgets the text."""
        self._text, self._start, self._hidden = None, 0, None

    def _before(self, layers: Sequence[object], position: int) -> mx.array | None:
        """Returns the hidden state [1, 1, D] of the last token that the target has seen; None if it is not known."""
        layer, hidden, row = counting(layers), self._hidden, position - 1 - self._start
        if hidden is None or layer is None or self._text is None or self._text() is not layer:
            return None
        return hidden[:, row : row + 1] if 0 <= row < hidden.shape[1] else None
