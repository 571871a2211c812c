"""The architectures of the installed mlx-lm that can be batched give every row the logits that it gets alone."""

from random import Random

import mlx.core as mx
import pytest

from scripts.tools.models.architectures import architectures, build, unserved
from scripts.tools.models.tiny import VOCAB, find_fault
from tests.model.cache.test_batch_models import journey

pytestmark = pytest.mark.slow

TURNS = {
    "afm7": "the logits of a trial are off",  # counts the positions of its last layers from the length of the buffers
    "deepseek_v41": "no batch of LayerCache",
    "gemma2": "cannot be broadcast",  # soft-capped attention by hand, for which the mask lacks a dimension
    "gpt_bigcode": "only length-1 arrays",  # numpy's arange over positions
    "llama4": "no batch of ChunkedKVCache",
    "phi3small": "cannot be broadcast",  # as gemma2
}
"""The architectures whose requests take turns, and why."""

BY_SLOT = {
    # Attention to whole blocks of keys, once there are more than it may choose: they are cut over the slots of the
    # cache, padding included. No trial of a few tokens sees it, and mlx-lm means it so.
    "minimax_m3_vl",
}
"""The architectures of which a long row that is padded looks at other blocks than it does alone."""

SERVED = tuple(name for name in architectures() if name not in unserved())


@pytest.mark.parametrize("name", SERVED)
def test_which_architectures_can_be_batched(name: str) -> None:
    model = build(name)

    def forward(tokens: mx.array, layers: list[object]) -> mx.array:
        return model.model(tokens, cache=layers)

    said = find_fault(model.make_layers, forward, VOCAB)
    assert TURNS.get(name, "").lower() in said.lower()
    assert bool(said) == (name in TURNS)


@pytest.mark.parametrize("name", [name for name in SERVED if name not in BY_SLOT | set(TURNS)])
def test_an_architecture_says_the_same_in_a_batch(name: str) -> None:
    """Prompts around the ends of all windows; rows join, leave, and join again."""
    journey(build(name), Random(5), rounds=5)


@pytest.mark.parametrize("name", sorted(BY_SLOT))
def test_the_answers_of_some_depend_on_the_padding(name: str) -> None:
    """Once this fails, they belong above."""
    with pytest.raises(AssertionError, match="logits differ"):
        journey(build(name), Random(5), rounds=6)
