"""What models that draft share with their target, the model whose answers they draft: its parts and hidden states."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from runner.cache.session import Session
from runner.engine.generation import Forward
from runner.model.weights.load import LoadedModel
from runner.sampling.sampler import Sampler

Map = Callable[[mx.array], mx.array]
Draw = Callable[[mx.array], mx.array]
"""Maps logits [1, V] to a token, uint32 [1], lazily. The token is part of the draw's own history from then on."""


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
        self._modules = [(module, type(module), _tapped(self, module, place)) for place, module in enumerate(modules)]
        self._most_rows = most_rows
        self._kept: dict[int, mx.array] = {}

    def turn(self, on: bool) -> None:
        """Turns it on or off; forwards cost nothing more while it is off."""
        self._kept = {}
        for module, plain, tapped in self._modules:
            module.__class__ = tapped if on else plain

    def keep(self, place: int, output: object) -> None:
        """Keeps the output of the module at this place of the list: an array, or the first of several."""
        states = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(states, mx.array) and states.ndim == 3:
            self._kept[place] = states[:, -self._most_rows :]

    def take(self) -> mx.array | None:
        """Returns the outputs of the last forward side by side, [B, L, M D] for M modules (lazy), and forgets them;
        None unless all modules have given one."""
        kept, self._kept = self._kept, {}
        if len(kept) < len(self._modules) or len({part.shape[:2] for part in kept.values()}) != 1:
            return None
        return mx.concatenate([kept[place] for place in range(len(kept))], axis=-1) if len(kept) > 1 else kept[0]


def _tapped(tap: Tap, module: Module, place: int) -> type[Module]:
    """Returns the class of the module with a tap after it."""
    plain = type(module)

    class Tapped(plain):  # type: ignore[misc, valid-type]  # the class of the module, whichever it is
        def __call__(self, *args: object, **kwargs: object) -> object:
            output = plain.__call__(self, *args, **kwargs)
            tap.keep(place, output)
            return output

    return Tapped


# --- Drafts from hidden states of the target.

GROWTH_TOKENS = 256
"""mlx-lm's layers grow by this many at a time."""


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


class HiddenStateDrafter(ABC):
    """A `DraftModel` that drafts from hidden states of its target: it keeps those of the last tokens of one text until
    it has read them.

    The text need not be followed from its beginning, and may go back: what the target sees later replaces what it saw.
    Owner: the engine thread.
    """

    at_once = False
    longest_forward = 80
    """Tokens of a forward of the target that is followed: a step, a round with forced tokens, the rest of a prompt.
    Long parts of a prompt would compute more than the prompt needs."""
    most_bytes: int

    def __init__(self, name: str, tapped: Sequence[Module], most_rows: int) -> None:
        """Follows the outputs of the modules `tapped`. Keeps `most_rows` hidden states that wait to be read: of a
        longer part of a prompt the last ones."""
        self.name = name
        self._tap = Tap(tapped, most_rows)
        self._most_rows = most_rows
        # Of the text that is followed.
        self._text: weakref.ref[object] | None = None  # a layer of the target, which stands for the text
        self._seen: list[_Seen] = []  # without a gap

    def watch(self, forward: Forward) -> Forward:
        """Returns the target's `forward`, which shows this drafter what it computes for single texts."""

        def watched(tokens: mx.array, layers: list[object]) -> mx.array:
            layer = counting(layers)
            if layer is None or tokens.shape[0] > 1 or tokens.shape[1] > self.longest_forward:
                return forward(tokens, layers)
            start = vars(layer)["offset"]
            self._tap.turn(True)
            try:
                logits = forward(tokens, layers)
                hidden = self._tap.take()
            finally:
                self._tap.turn(False)
            if hidden is not None:
                self.saw(layers, start + tokens.shape[1] - hidden.shape[1], hidden)
            return logits

        return watched

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
        """Returns the hidden states [1, L, D] of these tokens, which wait, and go on waiting until `skip`."""
        parts = [seen.part(start, stop).hidden for seen in self._seen if seen.stop > start and seen.start < stop]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

    def skip(self, to: int) -> None:
        """Forgets the hidden states of the tokens before `to`."""
        self._seen = [seen.part(to, seen.stop) for seen in self._seen if seen.stop > to]

    def read(self, session: Session, *, briefly: bool) -> bool:  # noqa: ARG002  it has seen what there is
        return False

    def propose(self, session: Session, most: int, sampler: Sampler) -> list[int]:
        recorded = session.recorded
        seen_all_but_one = len(recorded) == session.position + 1
        if not self.follows(session.layers) or not seen_all_but_one or recorded[-1] < 0:
            return []
        return self.draft(session, most, sampler.preview())

    @abstractmethod
    def draft(self, session: Session, most: int, draw: Draw) -> list[int]:
        """Returns at most `most` tokens, at least one, that may follow the recorded ones (the target has seen all of
        these but the last); none if too little is known of the text. Waits for them once."""

    def go_back(self, to: int) -> None:
        """Forgets the tokens of the text from `to` on: they are others now."""
        if self._seen and self._seen[-1].stop > to:
            self._seen = [seen.part(0, to) for seen in self._seen if seen.start < to]

    def free(self) -> None:
        self._text = None
        self._seen = []

    @property
    def nbytes(self) -> int:
        return sum(seen.hidden.nbytes for seen in self._seen)


def counting(layers: Sequence[object]) -> object | None:
    """Returns the first layer of a target that counts its tokens, which stands for the text; None if there is none."""
    return next((layer for layer in layers if isinstance(getattr(layer, "offset", None), int)), None)
