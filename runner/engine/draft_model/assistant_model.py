"""An assistant of the answering model, as a model that drafts."""

import mlx.core as mx

from runner.cache.session import LiveSession
from runner.engine.draft_model.interface import Forward
from runner.model.assistant.drafter import AssistantDrafter
from runner.model.assistant.load import Assistant
from runner.sampling.sampler import Sampler

_MOST_SEEN = 80  # tokens of a forward: a step, a round with forced tokens, the rest of a prompt


class AssistantModel:
    """Drafts from what the model has computed. Owner: the engine thread."""

    at_once = False

    def __init__(self, name: str, assistant: Assistant) -> None:
        self.name = name
        self._drafter = AssistantDrafter(assistant)
        width = assistant.target.norm["weight"].shape[0]
        self.most_bytes = 2 * _MOST_SEEN * width * mx.float32.size
        """The bytes that the hidden states of a forward and of the one before it may take."""

    def watch(self, forward: Forward) -> Forward:
        """Returns the model's `forward`, which shows the assistant what it computes. Long parts of a prompt are not
        shown: nothing is drafted behind them."""
        watched, tap = self._drafter.watch(forward), self._drafter.tap

        def shown(tokens: mx.array, layers: list[object]) -> mx.array:
            tap.turn(tokens.shape[1] <= _MOST_SEEN)
            return watched(tokens, layers)

        return shown

    @property
    def nbytes(self) -> int:
        return self._drafter.nbytes

    def read(self, session: LiveSession, *, briefly: bool) -> bool:  # noqa: ARG002  the model reads for it
        return False

    def propose(self, session: LiveSession, most: int, sampler: Sampler) -> list[int]:
        return self._drafter.propose(session.layers, session.position, session.recorded, most, sampler.preview())

    def free(self) -> None:
        self._drafter.free()
