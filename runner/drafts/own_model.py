"""A draft model with weights of its own, which reads the text by itself."""

from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from runner.cache.node import common_prefix
from runner.cache.sequence import LayerFacts, SequenceLayers, SequenceMark
from runner.drafts.target import GROWTH_TOKENS, Draw
from runner.engine.generation import Forward
from runner.engine.ports import DraftedAnswer
from runner.errors import ModelError
from runner.model.opened import OpenedModel
from runner.model.weights.assemble import rehearse
from runner.model.weights.dtype import DtypePlan, plan_dtypes
from runner.model.weights.load import LoadedModel, load
from runner.sampling.sampler import preview

# --- The layers of a draft model, which follow one text after the other.

WINDOW_TOKENS = 256
"""The end of a text with which a draft model begins. More would take longer to read than it makes drafts better."""
MOST_TOKENS = 4 * WINDOW_TOKENS
"""With more than these the model begins again, so its layers stay small, however long the text."""
_LEAD_TOKENS = 4  # of the text, before its end: many models look at their first tokens when there is nothing to see
_FIRST_ROUND = 2  # tokens; a single one is written into the arrays that a mark holds
MANY_TOKENS = 16
"""What is left to read when drafting begins: the logits of more, all but the last unused, would take longer than
another forward."""


class Reader:
    """Reads the end of a text, and drafts what follows. What it drafted and what came differ sooner or later: then it
    goes back to what they have in common. A text that begins like the last one is read on from there.

    Owner: the engine thread.
    """

    def __init__(self, make_layers: Callable[[], list[object]], forward: Forward, vocab_size: int) -> None:
        """`forward` maps tokens [1, L] below `vocab_size` and the layers to logits [1, L, V]."""
        self._forward = forward
        self._vocab_size = vocab_size
        self._sequence = SequenceLayers(make_layers(), LayerFacts())
        self._held: list[int] = []  # what the layers have seen
        self._left: Sequence[int] = ()  # what they have yet to see of the text
        self._start = self._lead = 0  # of the text they see the first `lead` tokens, and those from `start` on
        self._mark: SequenceMark | None = None  # where layers that do not rewind by themselves can go back to

    @property
    def left(self) -> int:
        """The number of tokens to read."""
        return len(self._left)

    @property
    def nbytes(self) -> int:
        """The bytes of the layers."""
        return self._sequence.nbytes

    def turn_to(self, text: Sequence[int], window: int = WINDOW_TOKENS) -> None:
        """Turns to this text: goes back to what the layers have in common with it. If more than `window` tokens would
        be left to read, begins anew with `window` of them. At least one is left, unless the model does not know the
        last one."""
        seen = self._part(text)
        common = min(common_prefix(self._held, seen), len(seen) - 1)
        goes_on = self._start < len(text) and len(seen) <= MOST_TOKENS and self._go_back(common)
        self._left = seen[len(self._held) :]
        if not goes_on or len(self._left) > window + _LEAD_TOKENS or not all(map(self._knows, self._left)):
            self._begin(text, window)

    def read(self, most: int) -> None:
        """Reads at most `most` of the tokens that are left, but for the last two, with which drafting begins."""
        count = min(most, len(self._left) - _FIRST_ROUND)
        self._compute(mx.array([self._left[:count]]))
        self._held += self._left[:count]
        self._left = self._left[count:]
        mx.async_eval(self._sequence.arrays())

    def wait(self) -> None:
        """Waits until everything is read."""
        self._sequence.evaluate()

    def draft(self, most: int, size: int, draw: Draw) -> list[int]:
        """Reads what is left, and drafts the next `most` tokens, at least one; none if there is nothing to read. Each
        is drawn from logits [1, size]."""
        sequence = self._sequence
        if not self._left:
            return []
        marked = not sequence.sliceable
        if marked and len(self._left) < _FIRST_ROUND and not self._read_again():
            return []
        if len(self._left) > (_FIRST_ROUND if marked else MANY_TOKENS):
            self.read(len(self._left))
        if marked:
            self._mark = sequence.mark(_FIRST_ROUND + most - 1)
        drafts = [draw(_of_size(self._compute(mx.array([self._left])), size))]
        self._held += self._left
        self._left = ()
        while len(drafts) < most:
            mx.async_eval(drafts[-1])
            drafts.append(draw(_of_size(self._compute(drafts[-1][:, None]), size)))
        found = cast("list[int]", mx.concatenate(drafts).tolist())
        self._held += found[:-1]
        return found

    def reset(self) -> None:
        """Frees all that was read."""
        self._sequence.reset()
        self._held = []
        self._left = ()
        self._mark = None
        self._start = 0
        self._lead = 0

    def _compute(self, tokens: mx.array) -> mx.array:
        """Returns the logits [1, V] of the token after these, uint32 [1, L]. Lazy."""
        logits = self._forward(tokens, self._sequence.layers)[:, -1]
        self._sequence.advance(tokens.shape[1])
        return logits

    def _begin(self, text: Sequence[int], window: int) -> None:
        self.reset()
        end = max(0, len(text) - window)
        unknown = [place for place in range(end, len(text)) if not self._knows(text[place])]
        start = unknown[-1] + 1 if unknown else end
        if start > _LEAD_TOKENS and all(map(self._knows, text[:_LEAD_TOKENS])):
            self._lead = _LEAD_TOKENS
        self._start = start
        self._left = self._part(text)

    def _part(self, text: Sequence[int]) -> list[int]:
        """Returns the tokens of the text that the model gets to see."""
        return [*text[: self._lead], *text[self._start :]]

    def _knows(self, token: int) -> bool:
        return 0 <= token < self._vocab_size

    def _go_back(self, to: int) -> bool:
        """Goes back to the first `to` tokens, or to fewer. Returns False if the layers cannot."""
        mark = self._mark
        if to < len(self._held):
            if self._sequence.rewind(to):
                if mark is None or mark.position > to:
                    return False
                to = mark.position
                if not all(state.can_revert(each, to) for state, each in mark.marks):
                    return False  # several forwards have passed, and a chunk ended in between
                self._sequence.revert(mark, to)
            self._mark = None
            del self._held[to:]
        return to >= 0

    def _read_again(self) -> bool:
        """Goes back by a token, which is left to read then. Returns False if the layers cannot."""
        held = [*self._held]
        if not held or not self._go_back(len(held) - 1):
            return False
        self._left = [*held[len(self._held) :], *self._left]
        return True


def _of_size(logits: mx.array, size: int) -> mx.array:
    """Returns logits [1, size]: a model may have rows for fewer or for more tokens than there are."""
    more = size - logits.shape[-1]
    return mx.pad(logits, [(0, 0), (0, more)], constant_values=-mx.inf) if more > 0 else logits[:, :size]


_PART_TOKENS = 64  # of a text, beside a step of its answer: takes about as long as a step of a model ten times as large
_BRIEF_TOKENS = _PART_TOKENS // 2
_SHORT_STEPS = 8  # of an answer that may be over before what is read for it has paid
_TRIED_TOKENS = 4


def unmarkable_layers(layers: list[object]) -> str:
    """Returns why a model with these fresh layers cannot take back what it drafted; empty if it can."""
    states = SequenceLayers(layers).states
    names = {type(getattr(state, "layer", state)).__name__ for state in states if not state.markable}
    return f"there is no way back in its {', '.join(sorted(names))}" if names else ""


class OwnDraftModel:
    """A model that drafts from the end of the text. One for all answers: it turns from one to the next. Owner: the
    engine thread."""

    at_once = False
    most_together = 1

    def __init__(self, name: str, make_layers: Callable[[], list[object]], forward: Forward, vocab_size: int) -> None:
        """`forward` is as in `Reader`. Raises ModelError if the layers of the model cannot go back, and what the
        first forward raises."""
        self.name = name
        if fault := unmarkable_layers(make_layers()):
            raise ModelError(fault)
        self._reader = Reader(make_layers, forward, vocab_size)
        self._reader.turn_to([0] * _TRIED_TOKENS)
        self._reader.read(_TRIED_TOKENS)
        self._reader.draft(1, vocab_size, lambda logits: mx.argmax(logits, axis=-1))
        self.most_bytes = (MOST_TOKENS // GROWTH_TOKENS + 1) * self._reader.nbytes
        """The bytes that its layers may take."""
        self._reader.reset()
        self._waited = 0  # steps, since there is more to read than fits beside one

    def watch(self, forward: Forward) -> Forward:
        """Returns the forward of the answer's model, which it takes no notice of."""
        return forward

    @property
    def nbytes(self) -> int:
        return self._reader.nbytes

    def read(self, answers: Sequence[DraftedAnswer], *, briefly: bool) -> bool:
        self._reader.turn_to(answers[0].session.recorded, _BRIEF_TOKENS if briefly else WINDOW_TOKENS)
        if self._reader.left <= _PART_TOKENS:
            self._waited = 0
            if self._reader.left > MANY_TOKENS:
                self._reader.read(self._reader.left)
                self._reader.wait()  # else it would count as a part of what drafting takes
            return False
        self._waited += 1
        if self._waited > _SHORT_STEPS:
            self._reader.read(_PART_TOKENS)
        return True

    def propose(
        self,
        answers: Sequence[DraftedAnswer],
        layers: Sequence[object],  # noqa: ARG002
        most: int,
    ) -> Sequence[Sequence[int]]:
        sampler = answers[0].sampler
        self._reader.turn_to(answers[0].session.recorded)
        return [self._reader.draft(most, sampler.vocab_size, preview([sampler]))]

    def free(self) -> None:
        self._reader.reset()


def plan_own_model(draft: OpenedModel, dtype: str, budget_bytes: int) -> tuple[Module, DtypePlan]:
    """Returns the model made of placeholders, and the types of its weights. Raises ModelError if it could not draft."""
    module = rehearse(draft)[0]
    types = plan_dtypes(dtype, module, budget_bytes)
    if fault := types.over_budget(budget_bytes, module) or unmarkable_layers(LoadedModel(module).make_layers()):
        raise ModelError(fault)
    return module, types


def load_own_model(
    draft: OpenedModel,
    target: LoadedModel,  # noqa: ARG001  it needs nothing of it
    dtype: str,
    budget_bytes: int,
) -> OwnDraftModel:
    """Loads the model. Raises what loading and its first forward raise."""
    weights = load(draft, dtype, budget_bytes)
    return OwnDraftModel(draft.name, weights.make_layers, weights.logits, draft.vocab_size)
