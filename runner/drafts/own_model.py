"""A draft model with weights and layers of its own. It reads the texts itself and uses nothing of the target."""

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
"""The last tokens of a text, which the model reads first. Reading more would need more time than better drafts save."""
MOST_TOKENS = 4 * WINDOW_TOKENS
"""The most tokens in the layers, of all texts together, but two windows for each text in any case. A text that exceeds
its share is begun anew with one window, so that the layers stay small."""
_LEAD_TOKENS = 4  # the first tokens of a text, read before its window: many models always attend to them
_MANY_TOKENS = 16
"""The most tokens that may be left to read when drafting begins. The first forward of drafting reads them: computing
more of their unused logits would last longer than a separate forward."""
_PART_TOKENS = 64  # the most tokens read in a step: in about the time of a plain step of a model ten times as large
_BRIEF_TOKENS = _PART_TOKENS // 2
_SHORT_STEPS = 8  # an answer waits for this many steps before much is read for it, since short answers end before
_MOST_DRAFTS = 64
_TRIED_TOKENS = 4  # the tokens of a text in the trial


class _ReadText:
    """A text, the tokens of it that the model should read, and the state of reading them."""

    def __init__(self, recorded: Sequence[int], tokens: list[int], layers: list[object]) -> None:
        self.recorded = recorded
        """The whole text, to which its session adds tokens."""
        self.left = tokens
        """The tokens that are left to read."""
        self.length = len(recorded)
        """The position in the text after the last token of `left`."""
        self.layers: list[object] | None = layers
        """The text's own layers; None once the text has a row in the layers of all texts."""
        self.read = 0
        """The number of recorded tokens that the layers have seen."""
        self.drafted: list[int] = []
        """The drafts that the layers have seen after the recorded tokens."""
        self.waited = 0
        """The number of consecutive steps with more than `_PART_TOKENS` tokens left to read."""

    def read_next(self, count: int) -> list[int]:
        """Returns the next `count` tokens of `left`, and counts them as read."""
        taken, self.left = self.left[:count], self.left[count:]
        self.read += count
        return taken


class OwnDraftModel:
    """A `DraftModel` with weights of its own that reads the ends of texts. Owner: the engine thread.

    At first each text has layers of its own. When the model drafts for a text, the text gets a row in common layers.
    The drafts stay in that row until it is known which of them are right."""

    at_once = False

    def __init__(
        self,
        name: str,
        make_layers: Callable[[], list[object]],
        forward: Forward,
        vocab_size: int,
        most_together: int = MOST_TOGETHER,
    ) -> None:
        """`forward` maps layers and tokens [B, L], all below `vocab_size`, to logits [B, L, V]. B is at most
        `most_together`. Raises ModelError if layers of several texts cannot be joined, and the errors of a trial."""
        self.name = name
        if fault := unbatchable_layers(make_layers()):
            raise ModelError(fault)
        self._make_layers = make_layers
        self._forward = forward
        self._vocab_size = vocab_size
        self._texts: WeakKeyDictionary[Session, _ReadText] = WeakKeyDictionary()
        self._rows: list[_ReadText] = []
        self._batch: BatchedLayers | None = None
        self._states: HeldStates = ()  # the states that the layers had before the drafts
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
            # Reads one text or, if the first text has a row, in one forward all texts with rows.
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
        """Returns the text of a session, after adding the tokens since the last call. Begins the text anew, with its
        last `window` tokens, if more would be left to read or if the layers would have more than `most` tokens."""
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
        """Returns a text with a row, but without a session, whose read tokens are the beginning of `recorded`: the
        session of the turn before has ended. Returns None if there is no such text."""
        followed = [*self._texts.values()]
        for text in self._rows:
            at = text.length - len(text.left)
            if text not in followed and at < len(recorded) and text.recorded[:at] == recorded[:at]:
                text.recorded, text.left, text.length = recorded, [], at
                return text
        return None

    def _end(self, recorded: Sequence[int], window: int) -> list[int]:
        """Returns the tokens of a text that the model reads first: the lead and the last `window` tokens. Skips all
        tokens up to the last one that the model does not know."""
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
        """Returns True if the model can draft after a text: 1 to `_MANY_TOKENS` tokens are left to read, and the text
        has at least 2 tokens."""
        return 0 < len(text.left) <= _MANY_TOKENS and text.read + len(text.left) > 1

    def _read(self, texts: Sequence[_ReadText]) -> None:
        """Reads a part of each of these texts, but not the last token. Waits for the forwards, so that their time does
        not count as time of drafting."""
        arrays = list[mx.array]()
        for text in texts:
            if text.layers is not None:
                tokens = text.read_next(min(_PART_TOKENS, len(text.left) - 1))
                self._forward(mx.array([tokens]), text.layers)
                arrays += _arrays(text.layers)
        if self._batch is not None and any(text in self._rows for text in texts):
            most = _PART_TOKENS // len(self._rows)
            self._read_rows([min(most, len(each.left) - 1) if each in texts else 0 for each in self._rows])
            arrays += _arrays(self._batch.layers)  # all arrays have to be computed, since the logits never are
        mx.eval(arrays)

    def _settle(self) -> None:
        """Removes the drafts from the rows. If no layer has states, drafts that were right stay, and count as read."""
        if self._batch is None or not any(text.drafted for text in self._rows):
            return
        for text in self._rows:
            if not self._states:
                text.read_next(common_prefix(text.drafted, text.left[:-1]))
            text.drafted = []
        self._batch.go_back(self._states, [text.read for text in self._rows])
        self._states = ()

    def _turn_to(self, texts: Sequence[_ReadText]) -> BatchedLayers:
        """Gives each of these texts a row. Other texts lose their rows, and must begin anew."""
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
        """Reads the next `counts` tokens of the texts that have rows. Returns the lazy logits [B, V] after the last of
        these tokens of each row."""
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
        """Makes a trial, since MLX refuses some layers only when they compute. Sets `most_together` to 1 if drafts of
        several rows cannot be taken back. Returns the bytes of a token's keys and values, and of a text's states."""
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
    """Pads logits with -inf, or cuts them, to [B, size]: a model may have logits for more or fewer tokens than that."""
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
    target: LoadedModel,  # noqa: ARG001  the model uses nothing of the target
    dtype: str,
    budget_bytes: int,
) -> OwnDraftModel:
    """Loads the draft model. Raises the errors of loading and of the trial."""
    weights = load(draft, dtype, budget_bytes)
    most_together = 1 if weights.unbatchable else MOST_TOGETHER
    return OwnDraftModel(draft.name, weights.make_layers, weights.logits, draft.vocab_size, most_together)
