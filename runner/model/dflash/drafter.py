"""Drafts with a DFlash draft: the tokens of one answer after the other."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import mlx.core as mx

from runner.model.dflash.config import DFlashConfig
from runner.model.dflash.module import Context, DFlashModule
from runner.model.dflash.target import BlockTarget, LayerTap
from runner.model.heads.follower import Draw, Follower

MOST_ROWS = 512
"""Rows of features that wait to be read. Those of a longer prompt are its last ones."""
CONTEXT_TOKENS = 2048
"""The context has at least as many of the last tokens, or as layers see back, and never more than twice as many."""


class BlockDraft(NamedTuple):
    """A draft and its target's parts. Owner: the engine thread."""

    config: DFlashConfig
    module: DFlashModule
    target: BlockTarget
    suppressed: tuple[int, ...] = ()
    """Tokens that must never be chosen."""

    def make_context(self, start: int) -> Context:
        """Returns an empty context of a text from its token `start` on."""
        return Context(len(self.config.windows), start)

    def read(self, features: mx.array, context: Context) -> None:
        """Adds features [1, S, T D] to the context, and lets MLX begin to compute them."""
        self.module.remember(features, context)
        mx.async_eval(context.arrays)

    def logits(self, token: int, count: int, features: mx.array | None, context: Context) -> mx.array:
        """Returns logits [1, count, V] of the tokens behind `token`, which follows the context. `features` are added to
        that before. Lazy."""
        block = mx.array([[token, *[self.config.mask_token] * count]])
        states = self.module(self.target.embed(block), features, context)
        scores = self.target.unembed(states[:, 1:])
        return scores.at[..., mx.array(self.suppressed)].minimum(-mx.inf) if self.suppressed else scores


class BlockDrafter(Follower):
    """Follows the text of one answer, and drafts behind it.

    Its context has keys and values of tokens that are certain, from the first one on of which it has seen the features:
    what a cache has restored is missing. Drafts get worse for it, answers never. Owner: the engine thread.
    """

    def __init__(self, draft: BlockDraft, most_rows: int = MOST_ROWS, context_tokens: int = CONTEXT_TOKENS) -> None:
        self.tap = LayerTap(draft.target.tapped, most_rows)
        """It must be on while an answer that may be drafted is computed."""
        super().__init__(self.tap, most_rows)
        self._draft = draft
        self._context = draft.make_context(0)
        self._recorded: Sequence[int] = ()  # the text of the context, and what has come since
        windows = draft.config.windows
        seen = min(context_tokens, max(windows)) if all(windows) else context_tokens
        self.context_tokens = max(seen, 2 * most_rows)
        """The context is cut to as many, which is not done often, before it has twice as many."""

    @property
    def nbytes(self) -> int:
        """The bytes of all but the weights."""
        return self._context.nbytes + self.waiting_bytes

    def read(self, position: int, recorded: Sequence[int], most: int) -> bool:
        """Reads `most` of the `recorded` tokens before `position` if more wait. Returns False if there were no more."""
        start = self._prepare(position, recorded)
        if start is None or position - start <= most:
            return False
        self._draft.read(self.waiting(start, start + most), self._context)
        return True

    def skip(self, position: int, most: int) -> None:
        """Forgets what waits, but for the last `most` tokens before `position`."""
        first = self.first_waiting(position)
        if first is not None and position - first > most:
            self.waiting(first, position - most)

    def propose(
        self, layers: Sequence[object], position: int, recorded: Sequence[int], most: int, draw: Draw
    ) -> list[int]:
        """Returns at most `most` tokens that may follow the `recorded` ones, of which the target has seen the first
        `position`: all but the last one; none if nothing is known of the text. Waits for them once."""
        most = min(most, self._draft.config.block - 1)
        if not self.follows(layers) or most < 1 or len(recorded) != position + 1 or recorded[-1] < 0:
            return []
        start = self._prepare(position, recorded)
        if start is None:
            return []
        features = self.waiting(start, position) if start < position else None
        logits = self._draft.logits(recorded[-1], most, features, self._context)
        drafts = [draw(logits[:, place]) for place in range(most)]
        return cast("list[int]", mx.concatenate(drafts).tolist())

    def go_back(self, to: int) -> None:
        if to < self._context.start:
            self._context = self._draft.make_context(to)
        elif to < self._context.stop:
            self._context.trim(to)

    def free(self) -> None:
        super().free()
        self._context, self._recorded = self._draft.make_context(0), ()

    def _prepare(self, position: int, recorded: Sequence[int]) -> int | None:
        """Makes the context one that the waiting features before `position` follow. Returns the first of them,
        `position` if none wait; None if too little is known."""
        context = self._context
        if recorded is not self._recorded and recorded[: context.stop] != self._recorded[: context.stop]:
            # The layers of the target have become those of another answer.
            self._context = context = self._draft.make_context(0)
        self._recorded = recorded
        if context.stop >= position:
            context.trim(position)
            return position if context.stop > context.start else None
        first = self.first_waiting(position)
        if first is None:
            return None
        if not context.start <= first <= context.stop or context.stop == context.start:
            self._context = context = self._draft.make_context(first)
        if context.stop - context.start >= 2 * self.context_tokens - self._most_rows:
            context.forget(max(context.start, context.stop - self.context_tokens))
        return context.stop
