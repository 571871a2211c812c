"""Models that draft from hidden states of their target. Owner: the engine thread."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx.nn.layers.base import Module

from runner.cache.layers.rows import KVRows
from runner.drafts.drafting import DraftedAnswer
from runner.drafts.target import Draw, Tap
from runner.engine.generation import Forward
from runner.sampling.sampler import preview_draws

MOST_TOGETHER = 8
"""The most answers for which a model drafts."""


class _Seen(NamedTuple):
    """Hidden states of consecutive tokens of a text."""

    start: int
    hidden: mx.array  # [1, L, D]

    @property
    def stop(self) -> int:
        return self.start + self.hidden.shape[1]

    def part(self, start: int, stop: int) -> "_Seen":
        if start <= self.start and stop >= self.stop:
            return self
        start = max(self.start, start)
        return _Seen(start, self.hidden[:, start - self.start : stop - self.start])


class SeenText:
    """The hidden states of the last tokens of a text that wait to be read. Owner: the engine thread."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []  # without a gap

    def saw(self, start: int, hidden: mx.array, most_rows: int) -> None:
        """Takes the lazy hidden states [1, L, D] of the tokens from `start` on, which the target has just seen. They
        replace earlier ones from there on, whose drafts were wrong. Keeps about the last `most_rows`."""
        self.go_back(start)
        if self._seen and self._seen[-1].stop != start:
            self._seen = []
        rows = hidden.shape[1]
        if rows > most_rows:
            start, hidden = start + rows - most_rows, hidden[:, -most_rows:]
        if rows > 1:
            # A part of a prompt may need no logits. If these states stayed lazy, they would keep keys and values of the
            # target alive, and MLX would copy those in the next forward.
            mx.async_eval(hidden)
        self._seen.append(_Seen(start, hidden))
        while self._seen[-1].stop - self._seen[0].stop >= most_rows:
            del self._seen[0]

    def first_waiting(self, stop: int) -> int | None:
        """Returns the place of the first token whose hidden states wait; None unless all of them up to `stop` do."""
        if not self._seen or self._seen[-1].stop < stop or self._seen[0].start >= stop:
            return None
        return self._seen[0].start

    def waiting(self, start: int, stop: int) -> mx.array:
        """Returns the waiting hidden states [1, L, D] of these tokens, which wait on until `skip`."""
        parts = [seen.part(start, stop).hidden for seen in self._seen if seen.stop > start and seen.start < stop]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

    def skip(self, to: int) -> None:
        """Forgets the hidden states of the tokens before `to`."""
        self._seen = [seen.part(to, seen.stop) for seen in self._seen if seen.stop > to]

    def go_back(self, to: int) -> None:
        """Forgets the tokens of the text from `to` on, since others replace them."""
        if self._seen and self._seen[-1].stop > to:
            self._seen = [seen.part(0, to) for seen in self._seen if seen.start < to]

    @property
    def nbytes(self) -> int:
        """The bytes of the waiting hidden states."""
        return sum(seen.hidden.nbytes for seen in self._seen)


AnyText = TypeVar("AnyText", bound=SeenText)


class HiddenStateDrafter(ABC, Generic[AnyText]):
    """A `DraftModel` that drafts from hidden states of its target. It keeps those of the last tokens of each text until
    it has read them.

    A text need not be followed from its beginning, and may go back: later hidden states replace earlier ones. Owner:
    the engine thread.
    """

    at_once = False
    most_together = MOST_TOGETHER
    longest_forward = 80
    """The most tokens of a forward of the target that is followed: a step, a round with forced tokens, the rest of a
    prompt. In longer parts of a prompt more would be computed than the prompt needs."""

    def __init__(self, name: str, tapped: Sequence[Module], most_rows: int, make_text: Callable[[], AnyText]) -> None:
        """Follows the outputs of the modules `tapped`. Keeps the last `most_rows` hidden states of each text until they
        are read. `make_text` returns a text without any."""
        self.name = name
        self._make_text = make_text
        self._tap = Tap(tapped, most_rows)
        self._most_rows = most_rows
        self._texts: WeakKeyDictionary[object, AnyText] = WeakKeyDictionary()
        """The texts by a layer of the target that stands for each, the one that was seen last at the end."""

    @abstractmethod
    def most_bytes(self, answers: int) -> int:
        """Returns the most bytes that all but the weights may take for this many answers."""

    def watch(self, forward: Forward) -> Forward:
        """Wraps the target's `forward`, whose hidden states this drafter takes."""

        def watched(tokens: mx.array, layers: list[object]) -> mx.array:
            rows = text_rows(layers)
            if not 0 < len(rows) <= self.most_together or tokens.shape[1] > self.longest_forward:
                return forward(tokens, layers)
            logits, hidden = self._tap.observe(partial(forward, tokens, layers))
            if hidden is not None:
                first = tokens.shape[1] - hidden.shape[1]
                for row, (layer, start) in enumerate(rows):
                    self.saw(layer, start + first, hidden[row : row + 1])
            return logits

        return watched

    def saw(self, layer: object, start: int, hidden: mx.array) -> None:
        """Takes the lazy hidden states [1, L, D] of the tokens from `start` on, which the target has just seen, for the
        text that `layer` stands for."""
        text = self._texts.pop(layer, None) or self._make_text()
        self._texts[layer] = text
        if len(self._texts) > self.most_together:
            del self._texts[next(iter(self._texts))]
        text.saw(start, hidden, self._most_rows)

    def text_of(self, answer: DraftedAnswer) -> AnyText | None:
        """Returns the text of an answer; None if it is not followed."""
        rows = text_rows(answer.session.layers)
        return self._texts.get(rows[0][0]) if rows else None

    def read_texts(self, answers: Sequence[DraftedAnswer], *, briefly: bool) -> bool:  # noqa: ARG002  its texts lack nothing
        return False

    def propose(self, answers: Sequence[DraftedAnswer], layers: Sequence[object], most: int) -> Sequence[Sequence[int]]:
        texts = [self.text_of(each) for each in answers]
        known = [
            (answer, text)
            for answer, text in zip(answers, texts, strict=True)
            if text is not None
            and len(answer.session.recorded) == answer.position + 1
            and answer.session.recorded[-1] >= 0
            and self.prepare(answer, text, layers)
        ]
        if not known:
            return [()] * len(answers)
        draw = preview_draws([answer.sampler for answer, _ in known])
        drafts = self.draft([answer for answer, _ in known], [text for _, text in known], layers, most, draw)
        found = {answer.row: tokens for (answer, _), tokens in zip(known, drafts, strict=True)}
        return [found.get(each.row, ()) for each in answers]

    @abstractmethod
    def prepare(self, answer: DraftedAnswer, text: AnyText, layers: Sequence[object]) -> bool:
        """Returns False if too little of an answer's text is known to draft for it. The target has seen all recorded
        tokens but the last, in `layers`."""

    @abstractmethod
    def draft(
        self,
        answers: Sequence[DraftedAnswer],
        texts: Sequence[AnyText],
        layers: Sequence[object],
        most: int,
        draw: Draw,
    ) -> Sequence[Sequence[int]]:
        """Returns for each answer at most `most` tokens, at least one, that may follow the recorded ones. Waits for
        them once. `prepare` has returned True for each answer."""

    def free(self) -> None:
        self._texts.clear()

    @property
    def nbytes(self) -> int:
        return sum(text.nbytes for text in self._texts.values())


class RowText(SeenText):
    """A text of which a drafter also has keys and values, made of hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.start = 0
        """The first place of the keys and values."""
        self.held = 0
        """The number of their places."""

    @property
    def at(self) -> int:
        """The place after them."""
        return self.start + self.held

    def begin(self, at: int) -> None:
        """Forgets the keys and values. The next ones belong to the place `at`."""
        self.start, self.held = at, 0


AnyRowText = TypeVar("AnyRowText", bound=RowText)


class RowDrafter(HiddenStateDrafter[AnyRowText]):
    """A drafter whose layers have a row of keys and values for each text of its last drafts. Only certain tokens keep
    their places there. Owner: the engine thread."""

    def __init__(
        self,
        name: str,
        tapped: Sequence[Module],
        most_rows: int,
        make_text: Callable[[], AnyRowText],
        make_layers: Callable[[int], list[KVRows]],
    ) -> None:
        """`make_layers` returns fresh layers with this many rows."""
        super().__init__(name, tapped, most_rows, make_text)
        self._make_layers = make_layers
        self._rows: list[AnyRowText] = []
        self._layers: list[KVRows] = []

    def turn_to(self, texts: Sequence[AnyRowText]) -> None:
        """Gives each of these texts its row. Other texts begin anew when they come back."""
        if self._rows == texts:
            return
        for text in self._rows:
            if text not in texts:
                text.begin(0)
        fresh = [text for text in texts if text not in self._rows]
        for text in fresh:
            text.begin(text.at)
        rows, self._rows = [*self._rows, *fresh], [*texts]
        if len(rows) == len(fresh) or not texts:
            self._layers = self._make_layers(len(texts)) if texts else []
            return
        for layer in self._layers:
            if fresh:
                layer.extend(KVRows(None, [[]] * len(fresh), [0] * len(fresh)))
            layer.filter([rows.index(text) for text in texts])

    def stand(self) -> None:
        """Lets each row end with its certain tokens."""
        for layer in self._layers:
            layer.stand([text.held for text in self._rows])

    def free(self) -> None:
        super().free()
        self._rows, self._layers = [], []

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers) + super().nbytes


def padded(hidden: mx.array, length: int) -> mx.array:
    """Pads hidden states [1, L, D] to [1, length, D]."""
    more = length - hidden.shape[1]
    return mx.pad(hidden, [(0, 0), (0, more), (0, 0)]) if more else hidden


def read_drafts(drafts: Sequence[mx.array]) -> list[list[int]]:
    """Waits for drafts, uint32 [B] for each place, and returns the drafts of each row."""
    return cast("list[list[int]]", mx.stack(list(drafts), axis=1).tolist())


def text_rows(layers: Sequence[object]) -> Sequence[tuple[object, int]]:
    """Returns for each row of a target's layers the layer that stands for its text, and the number of tokens that it
    has seen; nothing if no layer counts its tokens.

    Of an answer's own layers, the first one that counts stands for the text; of a batch, the layer whose copy the row
    is."""
    for layer in layers:
        if isinstance(layer, KVRows):
            sources = [source and source() for source in layer.sources]
            return [*zip(sources, layer.lengths, strict=True)]
        if isinstance(offset := getattr(layer, "offset", None), int):
            return [(layer, offset)]
    return []
