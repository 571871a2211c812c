"""The head of the answering model itself, as a model that drafts."""

from typing import cast

import mlx.core as mx

from runner.engine.draft_model.watching import WatchingModel
from runner.model.heads.drafter import MOST_SLOTS, HeadDrafter
from runner.model.heads.follower import MOST_ROWS
from runner.model.heads.head import Head

_GROWTH_TOKENS = 256  # mlx-lm's layers grow by as many at a time


class HeadModel(WatchingModel[HeadDrafter]):
    """Drafts with the model's own head."""

    def __init__(self, head: Head) -> None:
        layers, tokens = head.make_layers(), mx.zeros((1, 1), mx.uint32)
        states = head.states(head.target.embed(tokens), tokens, layers)
        mx.eval(states)
        kept = sum(cast("int", layer.nbytes) for layer in layers) * (MOST_SLOTS // _GROWTH_TOKENS)
        # Its layers, and the hidden states that wait to be read.
        super().__init__("the model's own head", HeadDrafter(head), kept + 2 * MOST_ROWS * states.nbytes)
