"""A draft model that watches what the answering model computes, in place of reading the text."""

from typing import TYPE_CHECKING, Generic, TypeVar

import mlx.core as mx

from runner.cache.session import LiveSession
from runner.engine.draft_model.interface import Forward
from runner.sampling.sampler import Sampler

if TYPE_CHECKING:
    from runner.model.assistant.drafter import AssistantDrafter
    from runner.model.dflash.drafter import BlockDrafter
    from runner.model.heads.drafter import HeadDrafter

Drafter = TypeVar("Drafter", bound="HeadDrafter | AssistantDrafter | BlockDrafter")
MOST_SEEN = 80
"""Tokens of a forward: a step, a round with forced tokens, the rest of a prompt."""


class WatchingModel(Generic[Drafter]):
    """Drafts from what the answering model has computed. Owner: the engine thread."""

    at_once = False

    def __init__(self, name: str, drafter: Drafter, most_bytes: int) -> None:
        self.name = name
        self.drafter = drafter
        self.most_bytes = most_bytes
        """The bytes that everything but the weights may take."""

    def watch(self, forward: Forward) -> Forward:
        """Returns the answering model's `forward`, which shows the drafter what it computes."""
        watched, tap = self.drafter.watch(forward), self.drafter.tap

        def shown(tokens: mx.array, layers: list[object]) -> mx.array:
            tap.turn(self.shows(tokens))
            try:
                return watched(tokens, layers)
            finally:
                tap.turn(False)

        return shown

    def shows(self, tokens: mx.array) -> bool:
        """Returns True if the drafter is to see the forward over `tokens` [B, L]. Long parts of a prompt would compute
        more than the prompt needs."""
        return tokens.shape[1] <= MOST_SEEN

    @property
    def nbytes(self) -> int:
        return self.drafter.nbytes

    def read(self, session: LiveSession, *, briefly: bool) -> bool:  # noqa: ARG002  it has seen what there is
        return False

    def propose(self, session: LiveSession, most: int, sampler: Sampler) -> list[int]:
        return self.drafter.propose(session.layers, session.position, session.recorded, most, sampler.preview())

    def free(self) -> None:
        self.drafter.free()
