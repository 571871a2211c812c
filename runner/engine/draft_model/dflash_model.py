"""A DFlash draft, as a model that drafts."""

import mlx.core as mx

from runner.cache.session import LiveSession
from runner.engine.draft_model.watching import WatchingModel
from runner.model.dflash.drafter import MOST_ROWS, BlockDraft, BlockDrafter

_PART_TOKENS = 64  # of a text, beside a step of its answer
_GROWTH_TOKENS = 256  # mlx-lm's layers grow by as many at a time


class DFlashModel(WatchingModel[BlockDrafter]):
    """Drafts with a DFlash draft: all tokens in one forward."""

    at_once = True

    def __init__(self, name: str, draft: BlockDraft) -> None:
        drafter = BlockDrafter(draft)
        context, width = draft.make_context(0), len(draft.config.taps) * draft.config.width
        row = mx.zeros((1, 1, width), draft.target.embed(mx.zeros((1, 1), mx.uint32)).dtype)
        draft.read(row, context)
        held = 2 * drafter.context_tokens // _GROWTH_TOKENS + 2
        # Its context, and the features that wait to be read.
        super().__init__(name, drafter, held * context.nbytes + 2 * MOST_ROWS * row.nbytes)

    def shows(self, tokens: mx.array) -> bool:
        """Returns True for a single answer: its tap keeps the last rows of a prompt, however long."""
        return tokens.shape[0] == 1

    def read(self, session: LiveSession, *, briefly: bool) -> bool:
        if not self.drafter.follows(session.layers):
            return False
        if briefly:
            self.drafter.skip(session.position, _PART_TOKENS)
        return self.drafter.read(session.position, session.recorded, _PART_TOKENS)
