"""Decoding without a server: the model, mlx-lm's caches and a loop. What `scripts/bench parallel` holds others against.

As every engine does it, step k+1 is dispatched before token k is read.
"""

from collections.abc import Sequence
from time import perf_counter

import mlx.core as mx

import runner.mlxlm  # noqa: F401  registers mlx_lm without its package __init__

# isort: split
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache


def decode_bare(model: llama.Model, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Greedy tokens per second of all rows together, one row for each prompt, over `tokens` steps after the first.

    Each prompt is read by itself; then the caches of the rows are merged, unless there is one.
    """
    rows = []
    for prompt in prompts:
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([prompt[:-1]]), cache), [layer.state for layer in cache])
        rows.append(cache)
    cache = rows[0] if len(rows) == 1 else [type(layers[0]).merge(layers) for layers in zip(*rows, strict=True)]

    def step(token: mx.array) -> mx.array:
        following = mx.argmax(model(token[:, None], cache)[:, -1, :], axis=-1)
        mx.async_eval(following)
        return following

    token = step(mx.array([prompt[-1] for prompt in prompts]))
    token.tolist()  # the first tokens: from here on it counts
    started = perf_counter()
    for _ in range(tokens):
        following = step(token)
        token.tolist()
        token = following
    token.tolist()
    return tokens * len(prompts) / (perf_counter() - started)
