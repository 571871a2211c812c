"""A draft model with weights of its own, which reads the texts by itself."""

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx.nn.layers.base import Module

from runner.cache.layers import flatten
from runner.cache.layers.batched import BatchedLayers, HeldStates, arrays_of, staying, unbatchable_layers
from runner.cache.layers.rows import LONG_STEP, SHORT_STEP
from runner.cache.node import common_prefix
from runner.cache.session import Session
from runner.drafts.drafting import DraftedAnswer
from runner.drafts.hidden_states import MOST_TOGETHER, read_drafts
from runner.engine.generation import Forward
from runner.errors import ModelError
from runner.model.opened import OpenedModel
from runner.model.weights.assembly import rehearse
from runner.model.weights.dtype import DtypePlan, plan_dtypes
from runner.model.weights.loading import LoadedModel, load
from runner.sampling.sampler import preview_draws

WINDOW_TOKENS = 256
"""The last tokens of a text with which a draft model begins. Reading more would cost more than better drafts save."""
MOST_TOKENS = 4 * WINDOW_TOKENS
"""With more tokens of all texts together, but at least two windows of each, the model begins anew, so its layers stay
small."""
_LEAD_TOKENS = 4  # the first tokens of a text, before its end: many models attend to them by default
_MANY_TOKENS = 16
"""The most tokens left to read when drafting begins. The unused logits of more would take longer than another
forward."""
_PART_TOKENS = 64  # read beside a step of the answer, in about the time of a step of a model ten times as large
_BRIEF_TOKENS = _PART_TOKENS // 2
_SHORT_STEPS = 8  # after them, reading for an answer may still pay
_MOST_DRAFTS = 64
_TRIED_TOKENS = 4


class _ReadText:
    """The end of a text, with its first tokens, and the place up to which the model has read it."""

    def __init__(self, recorded: Sequence[int], tokens: list[int], layers: list[object]) -> None:
        self.recorded = recorded
        """The whole text, which grows."""
        self.left = tokens
        """The tokens to read."""
        self.length = len(recorded)
        """The number of tokens of the text, up to the last one in `left`."""
        self.layers: list[object] | None = layers
        """Its own layers, until it has a row in those of all texts."""
        self.read = 0
        """The number of tokens that the layers have seen, all of them certain."""
        self.drafted: list[int] = []
        """The drafts that the layers have seen after them."""
        self.waited = 0
        """The number of steps with more to read than fits beside one."""

    def read_next(self, count: int) -> list[int]:
        """Returns the next `count` tokens, and counts them as read."""
        taken, self.left = self.left[:count], self.left[count:]
        self.read += count
        return taken


class OwnDraftModel:
    """A model that drafts from the ends of texts.

    It reads each text by itself until it drafts for it. Then the text gets a row in the layers of all texts that are
    drafted together. Drafts stay there until their outcome is known. Owner: the engine thread.
    """

    at_once = False

    def __init__(
        self,
        name: str,
        make_layers: Callable[[], list[object]],
        forward: Forward,
        vocab_size: int,
        most_together: int = MOST_TOGETHER,
    ) -> None:
        """`forward` maps tokens [B, L] below `vocab_size` and the layers to logits [B, L, V], for at most
        `most_together` texts. Raises ModelError if the layers cannot be joined, and the errors of the first forward."""
        self.name = name
        if fault := unbatchable_layers(make_layers()):
            raise ModelError(fault)
        self._make_layers = make_layers
        self._forward = forward
        self._vocab_size = vocab_size
        self._texts: WeakKeyDictionary[Session, _ReadText] = WeakKeyDictionary()
        self._rows: list[_ReadText] = []
        self._batch: BatchedLayers | None = None
        self._states: HeldStates = ()  # of the layers before the drafts
        self.most_together = most_together
        self._column_bytes, self._state_bytes = self._try()

    def watch(self, forward: Forward) -> Forward:
        return forward

    @property
    def nbytes(self) -> int:
        own = [text.layers for text in self._texts.values() if text.layers is not None]
        held = sum(array.nbytes for layers in own for array in _arrays(layers))
        return held + (0 if self._batch is None else self._batch.nbytes)

    def most_bytes(self, answers: int) -> int:
        tokens = max(MOST_TOKENS, 2 * WINDOW_TOKENS * answers) + answers * LONG_STEP
        return tokens * self._column_bytes + answers * self._state_bytes

    def read_texts(self, answers: Sequence[DraftedAnswer], *, briefly: bool) -> bool:
        window = _BRIEF_TOKENS if briefly else WINDOW_TOKENS
        most = max(MOST_TOKENS // len(answers), 2 * WINDOW_TOKENS)
        texts = [self._follow(each.session, window, most) for each in answers]
        self._settle()
        for text in texts:
            text.waited = text.waited + 1 if len(text.left) > _PART_TOKENS else 0
        behind = [text for text in texts if len(text.left) > _MANY_TOKENS and not 0 < text.waited <= _SHORT_STEPS]
        if behind:
            # One text, or in one forward all that have rows, since they fall behind together.
            self._read([text for text in behind if text in self._rows] if behind[0] in self._rows else behind[:1])
        return not any(map(self._is_ready, texts))

    def propose(
        self,
        answers: Sequence[DraftedAnswer],
        layers: Sequence[object],  # noqa: ARG002
        most: int,
    ) -> Sequence[Sequence[int]]:
        asked = {text: each for each in answers if (text := self._texts.get(each.session)) is not None}
        ready = [text for text in asked if self._is_ready(text)]
        if not ready:
            return [()] * len(answers)
        self._read([text for text in ready if not text.read])
        batch = self._turn_to([text for text in asked if text in ready or text in self._rows])
        samplers = [asked[text].sampler for text in self._rows]
        size, draw = samplers[0].vocab_size, preview_draws(samplers)
        counts = [len(text.left) if text in ready else 0 for text in self._rows]
        drafts = [draw(_of_size(self._read_rows(counts), size))]
        self._states = batch.states()
        for _ in range(min(most, _MOST_DRAFTS) - 1):
            mx.async_eval(drafts[-1])
            drafts.append(draw(_of_size(self._forward(drafts[-1][:, None], batch.layers)[:, -1], size)))
        found = {}
        for text, tokens in zip(self._rows, read_drafts(drafts), strict=True):
            text.drafted = tokens[:-1]
            found[asked[text].row] = tokens if text in ready else ()
        return [found.get(each.row, ()) for each in answers]

    def free(self) -> None:
        self._texts.clear()
        self._rows, self._batch, self._states = [], None, ()

    def _follow(self, session: Session, window: int, most: int) -> _ReadText:
        """Returns the text of a session, with the tokens since the last call. If more than `window` tokens would be
        left to read, or the layers would have more than `most`, it begins anew with the last `window`."""
        recorded, waited = session.recorded, 0
        text = self._texts.pop(session, None) or self._left_behind(recorded)
        if text is not None:
            waited = text.waited
            more = recorded[text.length :]
            text.left += more
            text.length = len(recorded)
            fits = len(text.left) <= window + _LEAD_TOKENS and text.read + len(text.left) <= most
            is_held = text.layers is not None or text in self._rows
            if not (fits and is_held and all(map(self._knows, more))):
                text = None
        if text is None:
            text = _ReadText(recorded, self._end(recorded, window), self._make_layers())
            text.waited = waited
        self._texts[session] = text
        if len(self._texts) > self.most_together:
            del self._texts[next(iter(self._texts))]
        return text

    def _left_behind(self, recorded: Sequence[int]) -> _ReadText | None:
        """Returns a text whose session has ended and with which this one begins, as one more turn does."""
        followed = [*self._texts.values()]
        for text in self._rows:
            at = text.length - len(text.left)
            if text not in followed and at < len(recorded) and text.recorded[:at] == recorded[:at]:
                text.recorded, text.left, text.length = recorded, [], at
                return text
        return None

    def _end(self, recorded: Sequence[int], window: int) -> list[int]:
        """Returns the tokens of a text with which the model begins: the first ones, and those of the window."""
        end = max(0, len(recorded) - window)
        unknown = [place for place in range(end, len(recorded)) if not self._knows(recorded[place])]
        start = unknown[-1] + 1 if unknown else end
        lead = (
            recorded[:_LEAD_TOKENS] if start > _LEAD_TOKENS and all(map(self._knows, recorded[:_LEAD_TOKENS])) else []
        )
        return [*lead, *recorded[start:]]

    def _knows(self, token: int) -> bool:
        return 0 <= token < self._vocab_size

    def _is_ready(self, text: _ReadText) -> bool:
        """Returns True if the model can draft after a text: at most `_MANY_TOKENS` are left to read, and at least one,
        with another one before it."""
        return 0 < len(text.left) <= _MANY_TOKENS and text.read + len(text.left) > 1

    def _read(self, texts: Sequence[_ReadText]) -> None:
        """Reads a part of these texts, but never their last tokens, and waits for it: else it would count as time of
        drafting."""
        arrays = list[mx.array]()
        for text in texts:
            if text.layers is not None:
                tokens = text.read_next(min(_PART_TOKENS, len(text.left) - 1))
                self._forward(mx.array([tokens]), text.layers)
                arrays += _arrays(text.layers)
        if self._batch is not None and any(text in self._rows for text in texts):
            most = _PART_TOKENS // len(self._rows)
            self._read_rows([min(most, len(each.left) - 1) if each in texts else 0 for each in self._rows])
            arrays += _arrays(self._batch.layers)  # all of them, since nobody computes the logits
        mx.eval(arrays)

    def _settle(self) -> None:
        """Takes the drafts out of the rows again; from layers without states, only the wrong ones."""
        if self._batch is None or not any(text.drafted for text in self._rows):
            return
        for text in self._rows:
            if not self._states:
                text.read_next(common_prefix(text.drafted, text.left[:-1]))
            text.drafted = []
        self._batch.go_back(self._states, [text.read for text in self._rows])
        self._states = ()

    def _turn_to(self, texts: Sequence[_ReadText]) -> BatchedLayers:
        """Gives each of these texts a row. Other texts begin anew when they come back."""
        kept = staying(len(self._rows), {row for row, text in enumerate(self._rows) if text not in texts})
        if len(kept) < len(self._rows) and kept and self._batch is not None:
            self._batch.keep(kept)
        self._rows = [self._rows[row] for row in kept]
        more = [text for text in texts if text not in self._rows]
        joining = [layers for text in more if (layers := text.layers) is not None]
        if self._batch is None or not kept:
            self._batch = BatchedLayers(joining, _MOST_DRAFTS)
        elif joining:
            self._batch.extend(joining)
        for text in more:
            text.layers = None
        self._rows += more
        return self._batch

    def _read_rows(self, counts: Sequence[int]) -> mx.array:
        """Reads the next tokens of each text that has a row. Returns the lazy logits [B, V] after them."""
        assert self._batch is not None
        tokens = [text.read_next(count) for text, count in zip(self._rows, counts, strict=True)]
        if len(set(counts)) == 1:
            logits = self._forward(mx.array(tokens), self._batch.layers)
        else:
            longest = max(2, *counts)
            rows = mx.array([[*row, *[0] * (longest - len(row))] for row in tokens])
            with self._batch.draft_round(longest):
                logits = self._forward(rows, self._batch.layers)
            self._batch.accept(counts)
        return logits[mx.arange(len(counts)), mx.array([*counts]) - 1]

    def _try(self) -> tuple[int, int]:
        """Drafts once, since MLX refuses some layers only when they compute, and finds out if the model can draft for
        several answers. Returns the bytes of a token's keys and values, and of a text's states."""
        for length in (_TRIED_TOKENS, _TRIED_TOKENS + 1)[: self.most_together]:
            text = _ReadText([], [0] * length, self._make_layers())
            self._read([text])
            self._rows.append(text)
        self._batch = BatchedLayers([text.layers for text in self._rows if text.layers is not None], _MOST_DRAFTS)
        with self._batch.draft_round(2):
            logits = self._forward(mx.zeros((len(self._rows), 2), mx.uint32), self._batch.layers)
        if not self._batch.may_accept:
            self.most_together = 1
        mx.eval(logits)
        kept, states = self._batch.nbytes_by_kind
        rows = len(self._rows)
        self.free()
        return -(-kept // (rows * SHORT_STEP)), states // rows


def _arrays(layers: Sequence[object]) -> list[mx.array]:
    return [array for layer in flatten(layers) for array in arrays_of(layer)]


def _of_size(logits: mx.array, size: int) -> mx.array:
    """Pads or cuts logits to [B, size]: a model may have rows for fewer or more tokens than the vocabulary."""
    more = size - logits.shape[-1]
    return mx.pad(logits, [(0, 0), (0, more)], constant_values=-mx.inf) if more > 0 else logits[:, :size]


def plan_own_model(draft: OpenedModel, dtype: str, budget_bytes: int) -> tuple[Module, DtypePlan]:
    """Returns the model made of placeholders, and the types of its weights. Raises ModelError if it cannot draft."""
    module = rehearse(draft)[0]
    types = plan_dtypes(dtype, module, budget_bytes)
    if fault := types.over_budget(budget_bytes, module) or unbatchable_layers(LoadedModel(module).make_layers()):
        raise ModelError(fault)
    return module, types


def load_own_model(
    draft: OpenedModel,
    target: LoadedModel,  # noqa: ARG001  only its answers are drafted
    dtype: str,
    budget_bytes: int,
) -> OwnDraftModel:
    """Loads the model. Raises the errors of loading and of its first forward."""
    weights = load(draft, dtype, budget_bytes)
    most_together = 1 if weights.unbatchable else MOST_TOGETHER
    return OwnDraftModel(draft.name, weights.make_layers, weights.logits, draft.vocab_size, most_together)
