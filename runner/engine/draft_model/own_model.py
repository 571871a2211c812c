"""A draft model with weights of its own, which reads the text by itself."""

from collections.abc import Callable

import mlx.core as mx

from runner.cache.sequence import SequenceLayers
from runner.cache.session import LiveSession
from runner.engine.draft_model.interface import Forward
from runner.engine.draft_model.reader import MANY_TOKENS, MOST_TOKENS, WINDOW_TOKENS, Reader
from runner.errors import ModelError
from runner.sampling.sampler import Sampler

_PART_TOKENS = 64  # of a text, beside a step of its answer: takes about as long as a step of a model ten times as large
_BRIEF_TOKENS = _PART_TOKENS // 2
_SHORT_STEPS = 8  # of an answer that may be over before what is read for it has paid
_TRIED_TOKENS = 4
_GROWTH_TOKENS = 256  # mlx-lm's layers grow by as many at a time


def unmarkable_layers(layers: list[object]) -> str:
    """Returns why a model with these fresh layers cannot take back what it drafted; empty if it can."""
    states = SequenceLayers(layers).states
    names = {type(getattr(state, "layer", state)).__name__ for state in states if not state.markable}
    return f"there is no way back in its {', '.join(sorted(names))}" if names else ""


class OwnDraftModel:
    """A model that drafts from the end of the text. One for all answers: it turns from one to the next. Owner: the
    engine thread."""

    at_once = False

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
        self.most_bytes = (MOST_TOKENS // _GROWTH_TOKENS + 1) * self._reader.nbytes
        """The bytes that its layers may take."""
        self._reader.reset()
        self._waited = 0  # steps, since there is more to read than fits beside one

    def watch(self, forward: Forward) -> Forward:
        """Returns the forward of the answer's model, which it takes no notice of."""
        return forward

    @property
    def nbytes(self) -> int:
        return self._reader.nbytes

    def read(self, session: LiveSession, *, briefly: bool) -> bool:
        self._reader.turn_to(session.recorded, _BRIEF_TOKENS if briefly else WINDOW_TOKENS)
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

    def propose(self, session: LiveSession, most: int, sampler: Sampler) -> list[int]:
        self._reader.turn_to(session.recorded)
        return self._reader.draft(most, sampler.vocab_size, sampler.preview())

    def free(self) -> None:
        self._reader.reset()
