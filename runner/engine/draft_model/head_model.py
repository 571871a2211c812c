"""The head of the answering model itself, as a model that drafts."""

from typing import cast

import mlx.core as mx

from runner.cache.session import LiveSession
from runner.engine.draft_model.interface import Forward
from runner.model.heads.drafter import MOST_SLOTS, HeadDrafter
from runner.model.heads.follower import MOST_ROWS
from runner.model.heads.head import Head
from runner.sampling.sampler import Sampler

_MOST_SEEN = 80  # tokens of a forward: a step, a round with forced tokens, the rest of a prompt
_GROWTH_TOKENS = 256  # mlx-lm's layers grow by as many at a time


class HeadModel:
    """Drafts from what the model has computed. Owner: the engine thread."""

    name = "the model's own head"
    at_once = False

    def __init__(self, head: Head) -> None:
        self._drafter = HeadDrafter(head)
        layers, tokens = head.make_layers(), mx.zeros((1, 1), mx.uint32)
        states = head.states(head.target.embed(tokens), tokens, layers)
        mx.eval(states)
        kept = sum(cast("int", layer.nbytes) for layer in layers) * (MOST_SLOTS // _GROWTH_TOKENS)
        self.most_bytes = kept + 2 * MOST_ROWS * states.nbytes
        """The bytes that its layers and the hidden states that wait to be read may take."""

    def watch(self, forward: Forward) -> Forward:
        """Returns the model's `forward`, which shows the head what it computes. Long parts of a prompt are not shown:
        they would compute more than the prompt needs."""
        watched, tap = self._drafter.watch(forward), self._drafter.tap

        def shown(tokens: mx.array, layers: list[object]) -> mx.array:
            tap.turn(tokens.shape[1] <= _MOST_SEEN)
            return watched(tokens, layers)

        return shown

    @property
    def nbytes(self) -> int:
        return self._drafter.nbytes

    def read(self, session: LiveSession, *, briefly: bool) -> bool:  # noqa: ARG002  it has seen what there is
        return False

    def propose(self, session: LiveSession, most: int, sampler: Sampler) -> list[int]:
        return self._drafter.propose(session.layers, session.position, session.recorded, most, sampler.preview())

    def free(self) -> None:
        self._drafter.free()
