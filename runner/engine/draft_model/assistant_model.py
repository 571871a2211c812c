"""An assistant of the answering model, as a model that drafts."""

import mlx.core as mx

from runner.engine.draft_model.watching import MOST_SEEN, WatchingModel
from runner.model.assistant.drafter import AssistantDrafter
from runner.model.assistant.load import Assistant


class AssistantModel(WatchingModel[AssistantDrafter]):
    """Drafts with an assistant."""

    def __init__(self, name: str, assistant: Assistant) -> None:
        row_bytes = assistant.target.norm["weight"].shape[0] * mx.float32.size
        # The hidden states of a forward, and of the one before it.
        super().__init__(name, AssistantDrafter(assistant), 2 * MOST_SEEN * row_bytes)
