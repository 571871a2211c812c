"""What the processes of a group are asked to do, and what they say."""

from collections.abc import Callable
from typing import TypedDict, cast

import mlx.core as mx

from runner.cache.layers.states import gather
from runner.model.weights.loading import LoadedModel

PROMPT = [(7 * index + index * index) % 64 for index in range(44)]
"""More tokens than the windows and chunks of the tiny models."""
_STEPS = 6


class Job(TypedDict):
    """Load a model, and write its scores to `out` with the number of the rank."""

    model: str
    models_dir: str
    dtype: str
    budget_bytes: int | None
    more_bytes: int
    """What each rank has more than the one before."""
    kv_bits: int | None
    out: str


class Outcome(TypedDict, total=False):
    """`error` alone, or all the rest."""

    error: str
    share_bytes: int
    state_shapes: list[list[int]]
    layers: list[str]
    dtypes: list[str]


def answer(model: LoadedModel, make_layers: Callable[[], list[object]]) -> tuple[mx.array, list[object]]:
    """Returns the scores [L + 6, V] of `PROMPT` and a greedy answer, and the layers after it."""
    layers, tokens, steps = make_layers(), PROMPT, []
    for _ in range(_STEPS + 1):
        scores = model.logits(mx.array([tokens]), layers)[0]
        mx.eval(scores)
        steps.append(scores)
        tokens = [cast("int", mx.argmax(scores[-1]).item())]
    return mx.concatenate(steps), layers


def state_shapes(layers: list[object]) -> list[list[int]]:
    """Returns the shapes of everything that the layers hold."""
    return [list(array.shape) for array in gather(layers, set())]
