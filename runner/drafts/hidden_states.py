"""The base classes of drafters that draft from hidden states of their target. Owner: the engine thread."""

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
"""The most answers for which a model drafts in one step."""


class _Seen(NamedTuple):
    """Hidden states of consecutive tokens of a text, from the token at `start` on."""

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
    """The hidden states of a text's last tokens, kept until a drafter has read them. Owner: the engine thread."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []  # of consecutive parts of the text

    def saw(self, start: int, hidden: mx.array, most_rows: int) -> None:
        """Adds the lazy hidden states [1, L, D] of the tokens from `start` on, which the target has just seen. Forgets
        earlier hidden states from `start` on: their tokens were wrong drafts. Keeps about the last `most_rows`."""
        self.go_back(start)
        if self._seen and self._seen[-1].stop != start:
            self._seen = []
        rows = hidden.shape[1]
        if rows > most_rows:
            start, hidden = start + rows - most_rows, hidden[:, -most_rows:]
        if rows > 1:
            # The logits of a prompt's part may never be computed. If its hidden states stayed lazy as well, they would
            # keep the target's keys and values alive, and MLX would have to copy these in the next forward.
            mx.async_eval(hidden)
        self._seen.append(_Seen(start, hidden))
        while self._seen[-1].stop - self._seen[0].stop >= most_rows:
            del self._seen[0]

    def first_waiting(self, stop: int) -> int | None:
        """Returns the position of the first token whose hidden states wait to be read. Returns None unless all hidden
        states from there to `stop` wait."""
        if not self._seen or self._seen[-1].stop < stop or self._seen[0].start >= stop:
            return None
        return self._seen[0].start

    def waiting(self, start: int, stop: int) -> mx.array:
        """Returns the hidden states [1, L, D] of the tokens from `start` to `stop`. Keeps them; `skip` forgets them."""
        parts = [seen.part(start, stop).hidden for seen in self._seen if seen.stop > start and seen.start < stop]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

    def skip(self, to: int) -> None:
        """Forgets the hidden states of the tokens before `to`."""
        self._seen = [seen.part(to, seen.stop) for seen in self._seen if seen.stop > to]

    def go_back(self, to: int) -> None:
        """Forgets the tokens of the text from `to` on, since other tokens replace them."""
        if self._seen and self._seen[-1].stop > to:
            self._seen = [seen.part(0, to) for seen in self._seen if seen.start < to]

    @property
    def nbytes(self) -> int:
        """The bytes of the hidden states that wait to be read."""
        return sum(seen.hidden.nbytes for seen in self._seen)


AnyText = TypeVar("AnyText", bound=SeenText)


class HiddenStateDrafter(ABC, Generic[AnyText]):
    """A `DraftModel` that drafts from hidden states of its target. Owner: the engine thread.

    It keeps the hidden states of each text's last tokens until it has read them. It may miss the beginning of a text.
    A text may go back to an earlier position: later hidden states then replace earlier ones."""

    at_once = False
    most_together = MOST_TOGETHER
    longest_forward = 80
    """The longest forward, in tokens, whose hidden states are kept: a step, a round with forced tokens, or the rest of
    a prompt. In longer parts of a prompt, keeping them would compute more than the prompt needs."""

    def __init__(self, name: str, tapped: Sequence[Module], most_rows: int, make_text: Callable[[], AnyText]) -> None:
        """The hidden states are the outputs of the target's modules `tapped`. The last `most_rows` of each text are
        kept until they are read. `make_text` returns a text without hidden states."""
        self.name = name
        self._make_text = make_text
        self._tap = Tap(tapped, most_rows)
        self._most_rows = most_rows
        self._texts: WeakKeyDictionary[object, AnyText] = WeakKeyDictionary()
        """Layer of the target that stands for a text -> the text. The text that was seen last is at the end."""

    @abstractmethod
    def most_bytes(self, answers: int) -> int:
        """Returns the most bytes that the drafter can hold beside its weights for this many answers."""

    def watch(self, forward: Forward) -> Forward:
        """Returns the target's `forward`, wrapped so that this drafter keeps its hidden states."""

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
        """Adds lazy hidden states [1, L, D], of the tokens from `start` on, to the text for which `layer` stands."""
        text = self._texts.pop(layer, None) or self._make_text()
        self._texts[layer] = text
        if len(self._texts) > self.most_together:
            del self._texts[next(iter(self._texts))]
        text.saw(start, hidden, self._most_rows)

    def text_of(self, answer: DraftedAnswer) -> AnyText | None:
        """Returns the text of an answer; None if no hidden states of the text have been seen."""
        rows = text_rows(answer.session.layers)
        return self._texts.get(rows[0][0]) if rows else None

    def read_texts(self, answers: Sequence[DraftedAnswer], *, briefly: bool) -> bool:  # noqa: ARG002  reads while it drafts
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
        """Prepares the text of an answer for `draft`. Returns False if too little of it is known to draft. `layers` are
        the target's; they must have seen all recorded tokens but the last."""

    @abstractmethod
    def draft(
        self,
        answers: Sequence[DraftedAnswer],
        texts: Sequence[AnyText],
        layers: Sequence[object],
        most: int,
        draw: Draw,
    ) -> Sequence[Sequence[int]]:
        """Returns for each answer 1 to `most` tokens that may follow the recorded ones. Waits for all of them together.
        `prepare` must have returned True for each answer."""

    def free(self) -> None:
        self._texts.clear()

    @property
    def nbytes(self) -> int:
        return sum(text.nbytes for text in self._texts.values())


class RowText(SeenText):
    """A text for which a drafter also has keys and values, made of the hidden states that it has read."""

    def __init__(self) -> None:
        super().__init__()
        self.start = 0
        """The position in the text of the first keys and values."""
        self.held = 0
        """The number of positions with keys and values."""

    @property
    def at(self) -> int:
        """The position after the last keys and values."""
        return self.start + self.held

    def begin(self, at: int) -> None:
        """Forgets the keys and values. The next keys and values belong to the position `at`."""
        self.start, self.held = at, 0


AnyRowText = TypeVar("AnyRowText", bound=RowText)


class RowDrafter(HiddenStateDrafter[AnyRowText]):
    """A drafter whose layers have a row of keys and values for each text for which it drafted last. The keys and values
    of drafts are removed from the rows again. Owner: the engine thread."""

    def __init__(
        self,
        name: str,
        tapped: Sequence[Module],
        most_rows: int,
        make_text: Callable[[], AnyRowText],
        make_layers: Callable[[int], list[KVRows]],
    ) -> None:
        """`make_layers(n)` returns empty layers with n rows."""
        super().__init__(name, tapped, most_rows, make_text)
        self._make_layers = make_layers
        self._rows: list[AnyRowText] = []
        self._layers: list[KVRows] = []

    def turn_to(self, texts: Sequence[AnyRowText]) -> None:
        """Gives each of these texts a row, in this order. Other texts lose their rows and must be read anew."""
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
        """Removes the keys and values of drafts from the rows: each row ends after the `held` tokens of its text."""
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
    """Waits for drafted tokens, and returns the tokens of each row. `drafts` has an array uint32 [B] for each place."""
    return cast("list[list[int]]", mx.stack(list(drafts), axis=1).tolist())


def text_rows(layers: Sequence[object]) -> Sequence[tuple[object, int]]:
    """Returns for each row of a target's layers the layer that stands for the row's text, and the number of tokens that
    this layer has seen. The result is empty if no layer counts its tokens.

    If one answer has the layers, the first layer that counts stands for its text. If a batch has them, each of its rows
    is a copy of an answer's layer, and that layer stands for the text."""
    for layer in layers:
        if isinstance(layer, KVRows):
            sources = [source and source() for source in layer.sources]
            return [*zip(sources, layer.lengths, strict=True)]
        if isinstance(offset := getattr(layer, "offset", None), int):
            return [(layer, offset)]
    return []
