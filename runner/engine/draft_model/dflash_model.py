"""A DFlash draft, as a model that drafts."""

import mlx.core as mx

from runner.cache.session import LiveSession
from runner.engine.draft_model.interface import Forward
from runner.model.dflash.drafter import MOST_ROWS, BlockDraft, BlockDrafter
from runner.sampling.sampler import Sampler

_PART_TOKENS = 64  # of a text, beside a step of its answer
_GROWTH_TOKENS = 256  # mlx-lm's layers grow by as many at a time


class DFlashModel:
    """Drafts from what the model has computed, all tokens of a draft in one forward. Owner: the engine thread."""

    at_once = True

    def __init__(self, name: str, draft: BlockDraft) -> None:
        self.name = name
        self._drafter = BlockDrafter(draft)
        context, width = draft.make_context(0), len(draft.config.taps) * draft.config.width
        row = mx.zeros((1, 1, width), draft.target.embed(mx.zeros((1, 1), mx.uint32)).dtype)
        draft.read(row, context)
        held = 2 * self._drafter.context_tokens // _GROWTH_TOKENS + 2
        self.most_bytes = held * context.nbytes + 2 * MOST_ROWS * row.nbytes
        """The bytes that its context and the features that wait to be read may take."""

    def watch(self, forward: Forward) -> Forward:
        """Returns the model's `forward`, which shows the draft what it computes for a single answer."""
        watched, tap = self._drafter.watch(forward), self._drafter.tap

        def shown(tokens: mx.array, layers: list[object]) -> mx.array:
            tap.turn(tokens.shape[0] == 1)
            try:
                return watched(tokens, layers)
            finally:
                tap.turn(False)

        return shown

    @property
    def nbytes(self) -> int:
        return self._drafter.nbytes

    def read(self, session: LiveSession, *, briefly: bool) -> bool:
        if not self._drafter.follows(session.layers):
            return False
        if briefly:
            self._drafter.skip(session.position, _PART_TOKENS)
        return self._drafter.read(session.position, session.recorded, _PART_TOKENS)

    def propose(self, session: LiveSession, most: int, sampler: Sampler) -> list[int]:
        return self._drafter.propose(session.layers, session.position, session.recorded, most, sampler.preview())

    def free(self) -> None:
        self._drafter.free()
