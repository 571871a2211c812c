"""What models that draft share with their target, the model whose answers they draft: its parts and hidden states."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx.nn.layers.base import Module

from runner.cache.layers.rows import KVRows
from runner.drafts.drafting import DraftedAnswer
from runner.engine.generation import Forward
from runner.model.weights.loading import LoadedModel
from runner.model.weights.parameters import observed
from runner.sampling.sampler import preview_draws

Map = Callable[[mx.array], mx.array]
Draw = Callable[[mx.array], mx.array]
"""Maps logits [B, V] to tokens, uint32 [B], lazily. They are part of the draw's own histories from then on."""


class Target(NamedTuple):
    """The parts of a text model that a drafter uses. They stay the model's own: nothing is copied."""

    args: object
    """The arguments that its class was made from."""
    embed: Map
    """Token ids [B, L] to rows [B, L, D], on the model's own scale."""
    unembed: Map
    """Hidden states after the final norm, [B, L, D], to logits [B, L, V], on the model's own scale. Those of tokens
    that must never be chosen are -inf."""
    norm: Module
    """The final norm."""
    layers: Sequence[Module]


def target_of(loaded: LoadedModel) -> Target:
    """Returns the parts of a model of mlx-lm's, which may be made of placeholders: nothing is computed."""
    text = cast("Module", getattr(loaded.module, "language_model", loaded.module))
    inner = text["model"] if "model" in text else text["backbone"]
    table = inner["embed_tokens"] if "embed_tokens" in inner else inner["embeddings"]
    return Target(
        getattr(text, "args", None),
        _embedding(table, getattr(inner, "embed_scale", 1.0)),
        _output(text.get("lm_head", table.as_linear), text, loaded.suppressed),
        cast("Module", inner.get("norm", inner.get("norm_f"))),  # DFlash drafts need none
        inner["layers"],
    )


def _embedding(table: Map, scale: float) -> Map:
    return table if scale == 1.0 else lambda tokens: table(tokens) * scale


def _output(project: Map, text: Module, suppressed: Collection[int]) -> Map:
    """Returns the output layer with the scale that some models give their logits. Drafts are drawn as the target draws:
    on another scale they would hardly ever be the same."""
    args = getattr(text, "args", None)
    factor, most = getattr(args, "output_multiplier", 1.0), getattr(args, "final_logit_softcapping", None)

    def unembed(states: mx.array) -> mx.array:
        logits = project(states)
        if factor != 1.0:
            logits = logits * factor
        if most:
            logits = mx.tanh(logits / most) * most
        return without(suppressed, logits)

    return unembed


def without(suppressed: Collection[int], logits: mx.array) -> mx.array:
    """Returns the logits [..., V] with -inf for tokens that must never be chosen."""
    return logits.at[..., mx.array([*suppressed])].minimum(-mx.inf) if suppressed else logits


class Tap:
    """Keeps the outputs of chosen modules of the last forward, while it is on. A model has one tap at most.

    The modules compute what they always do. Owner: the engine thread.
    """

    def __init__(self, modules: Sequence[Module], most_rows: int) -> None:
        """Keeps no more than the last `most_rows` of each."""
        self._modules = [
            (module, type(module), observed(type(module), partial(self.keep, place)))
            for place, module in enumerate(modules)
        ]
        self._most_rows = most_rows
        self._kept: dict[int, mx.array] = {}

    def turn(self, on: bool) -> None:
        """Turns it on or off; forwards cost nothing more while it is off."""
        self._kept = {}
        for module, plain, tapped in self._modules:
            module.__class__ = tapped if on else plain

    def keep(self, place: int, states: mx.array) -> None:
        """Keeps the output of the module at this place of the list."""
        if states.ndim == 3:
            self._kept[place] = states[:, -self._most_rows :]

    def take(self) -> mx.array | None:
        """Returns the outputs of the last forward side by side, [B, L, M D] for M modules (lazy), and forgets them;
        None unless all modules have given one."""
        kept, self._kept = self._kept, {}
        if len(kept) < len(self._modules) or len({part.shape[:2] for part in kept.values()}) != 1:
            return None
        return mx.concatenate([kept[place] for place in range(len(kept))], axis=-1) if len(kept) > 1 else kept[0]


# --- Drafts from hidden states of the target.

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
    """The hidden states of the last tokens of a text, which wait to be read. Owner: the engine thread."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []  # without a gap

    def saw(self, start: int, hidden: mx.array, most_rows: int) -> None:
        """Takes the hidden states [1, L, D] (lazy) of the tokens from `start` on, which the target has just seen. What
        it saw from there on before was not right. Keeps about the last `most_rows`."""
        self.go_back(start)
        if self._seen and self._seen[-1].stop != start:
            self._seen = []
        rows = hidden.shape[1]
        if rows > most_rows:
            start, hidden = start + rows - most_rows, hidden[:, -most_rows:]
        if rows > 1:
            # A part of a prompt may need no logits. Not computed, it would keep keys and values of the target alive,
            # and MLX would copy them in the next forward.
            mx.async_eval(hidden)
        self._seen.append(_Seen(start, hidden))
        while self._seen[-1].stop - self._seen[0].stop >= most_rows:
            del self._seen[0]

    def first_waiting(self, stop: int) -> int | None:
        """Returns the place of the first token whose hidden states wait; None unless all from there to `stop` do."""
        if not self._seen or self._seen[-1].stop < stop or self._seen[0].start >= stop:
            return None
        return self._seen[0].start

    def waiting(self, start: int, stop: int) -> mx.array:
        """Returns the hidden states [1, L, D] of these tokens, which wait, and go on waiting until `skip`."""
        parts = [seen.part(start, stop).hidden for seen in self._seen if seen.stop > start and seen.start < stop]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

    def skip(self, to: int) -> None:
        """Forgets the hidden states of the tokens before `to`."""
        self._seen = [seen.part(to, seen.stop) for seen in self._seen if seen.stop > to]

    def go_back(self, to: int) -> None:
        """Forgets the tokens of the text from `to` on: they are others now."""
        if self._seen and self._seen[-1].stop > to:
            self._seen = [seen.part(0, to) for seen in self._seen if seen.start < to]

    @property
    def nbytes(self) -> int:
        """The bytes of all that is kept of the text."""
        return sum(seen.hidden.nbytes for seen in self._seen)


AnyText = TypeVar("AnyText", bound=SeenText)


class HiddenStateDrafter(ABC, Generic[AnyText]):
    """A `DraftModel` that drafts from hidden states of its target: it keeps those of the last tokens of each text until
    it has read them.

    A text need not be followed from its beginning, and may go back: what the target sees later replaces what it saw.
    Owner: the engine thread.
    """

    at_once = False
    most_together = MOST_TOGETHER
    longest_forward = 80
    """Tokens of a forward of the target that is followed: a step, a round with forced tokens, the rest of a prompt.
    Long parts of a prompt would compute more than the prompt needs."""

    def __init__(self, name: str, tapped: Sequence[Module], most_rows: int) -> None:
        """Follows the outputs of the modules `tapped`. Keeps `most_rows` hidden states of each text that wait to be
        read: of a longer part of a prompt the last ones."""
        self.name = name
        self._tap = Tap(tapped, most_rows)
        self._most_rows = most_rows
        self._texts: WeakKeyDictionary[object, AnyText] = WeakKeyDictionary()
        """By a layer of the target, which stands for the text; the one that was seen last at the end."""

    @abstractmethod
    def most_bytes(self, answers: int) -> int:
        """Returns the bytes that all but the weights may take for so many answers."""

    @abstractmethod
    def make_text(self) -> AnyText:
        """Returns what is known of a text at first: nothing."""

    def watch(self, forward: Forward) -> Forward:
        """Returns the target's `forward`, which shows this drafter what it computes."""

        def watched(tokens: mx.array, layers: list[object]) -> mx.array:
            rows = text_rows(layers)
            if not 0 < len(rows) <= self.most_together or tokens.shape[1] > self.longest_forward:
                return forward(tokens, layers)
            self._tap.turn(True)
            try:
                logits = forward(tokens, layers)
                hidden = self._tap.take()
            finally:
                self._tap.turn(False)
            if hidden is not None:
                first = tokens.shape[1] - hidden.shape[1]
                for row, (layer, start) in enumerate(rows):
                    self.saw(layer, start + first, hidden[row : row + 1])
            return logits

        return watched

    def saw(self, layer: object, start: int, hidden: mx.array) -> None:
        """Takes the hidden states [1, L, D] (lazy) of the tokens from `start` on, which the target has just seen. The
        `layer` stands for their text."""
        text = self._texts.pop(layer, None) or self.make_text()
        self._texts[layer] = text
        if len(self._texts) > self.most_together:
            del self._texts[next(iter(self._texts))]
        text.saw(start, hidden, self._most_rows)

    def text_of(self, answer: DraftedAnswer) -> AnyText | None:
        """Returns what is known of the text of an answer; None if it is not followed."""
        rows = text_rows(answer.session.layers)
        return self._texts.get(rows[0][0]) if rows else None

    def read(self, answers: Sequence[DraftedAnswer], *, briefly: bool) -> bool:  # noqa: ARG002  it has seen all
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
        """Returns False if too little is known of the text of an answer to draft for it. The target has seen all of the
        recorded tokens but the last; `layers` are those of its forwards."""

    @abstractmethod
    def draft(
        self,
        answers: Sequence[DraftedAnswer],
        texts: Sequence[AnyText],
        layers: Sequence[object],
        most: int,
        draw: Draw,
    ) -> Sequence[Sequence[int]]:
        """Returns for each answer at most `most` tokens, at least one, that may follow the recorded ones. `prepare` has
        returned True for each. Waits for them once."""

    def free(self) -> None:
        self._texts.clear()

    @property
    def nbytes(self) -> int:
        return sum(text.nbytes for text in self._texts.values())


# --- Keys and values that are made of hidden states.


class RowText(SeenText):
    """A text of which a drafter has keys and values, too."""

    def __init__(self) -> None:
        super().__init__()
        self.start = 0
        """The first place that they stand for."""
        self.held = 0
        """The number of places."""

    @property
    def at(self) -> int:
        """The place after them."""
        return self.start + self.held

    def begin(self, at: int) -> None:
        """Forgets the keys and values. The next ones are those of this place."""
        self.start, self.held = at, 0


AnyRowText = TypeVar("AnyRowText", bound=RowText)


class RowDrafter(HiddenStateDrafter[AnyRowText]):
    """A drafter whose layers have a row of keys and values for each text that it drafted for the last time. Only those
    of tokens that are certain stay there. Owner: the engine thread."""

    def __init__(self, name: str, tapped: Sequence[Module], most_rows: int) -> None:
        super().__init__(name, tapped, most_rows)
        self._rows: list[AnyRowText] = []
        self._layers: list[KVRows] = []

    @abstractmethod
    def make_layers(self, rows: int) -> list[KVRows]:
        """Returns fresh layer caches for so many texts."""

    def turn_to(self, texts: Sequence[AnyRowText]) -> None:
        """Gives each of these texts its row. Others begin anew when they come back."""
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
            self._layers = self.make_layers(len(texts)) if texts else []
            return
        for layer in self._layers:
            if fresh:
                layer.extend(KVRows(None, [[]] * len(fresh), [0] * len(fresh)))
            layer.filter([rows.index(text) for text in texts])

    def stand(self) -> None:
        """Lets each row end with what is certain."""
        for layer in self._layers:
            layer.stand([text.held for text in self._rows])

    def free(self) -> None:
        super().free()
        self._rows, self._layers = [], []

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers) + super().nbytes


def padded(hidden: mx.array, length: int) -> mx.array:
    """Returns hidden states [1, length, D] that begin with these, [1, L, D]."""
    more = length - hidden.shape[1]
    return mx.pad(hidden, [(0, 0), (0, more), (0, 0)]) if more else hidden


def read_drafts(drafts: Sequence[mx.array]) -> list[list[int]]:
    """Waits for drafts, uint32 [B] for each place, and returns those of each row."""
    return cast("list[list[int]]", mx.stack(list(drafts), axis=1).tolist())


def text_rows(layers: Sequence[object]) -> Sequence[tuple[object, int]]:
    """Returns for each row of these layers of a target the layer that stands for its text, and how many tokens it has
    seen; nothing if none of them counts its tokens. Of an answer's own layers that is the first one that counts, and of
    a batch the one that its row is a copy of."""
    for layer in layers:
        if isinstance(layer, KVRows):
            sources = [source and source() for source in layer.sources]
            return [*zip(sources, layer.lengths, strict=True)]
        if isinstance(offset := getattr(layer, "offset", None), int):
            return [(layer, offset)]
    return []
