"""mlx-vlm's own computation: its loader, its caches, its positions, its loops, as its `generate` calls them."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from runner.vlm.module import import_package

import_package("base")  # registers mlx_vlm without its own __init__


def load(directory: Path) -> Any:
    """Returns the model of a directory as mlx-vlm loads it."""
    return importlib.import_module("mlx_vlm.utils").load_model(directory)


@patch("runner.model.scans.functions.available", lambda *_, **__: False)
def logits(model: Any, prompt: Sequence[int], answer: Sequence[int], **media: Any) -> mx.array:
    """Returns the logits [1, L, V] of a prompt in one forward, and of the tokens after it one by one.

    `media` are the arrays that a processor makes of the prompt's pictures.
    """
    cache = importlib.import_module("mlx_vlm.models.cache").make_prompt_cache(model.language_model)
    forget(model)
    ids = mx.array([prompt])
    pixels = media.pop("pixel_values", None)
    found = model.get_input_embeddings(ids, pixels, mask=mx.ones_like(ids), **media)
    parts = {name: value for name, value in found.to_dict().items() if value is not None}
    steps = [model.language_model(ids, cache=cache, **{**media, **parts}).logits]
    steps += [model.language_model(mx.array([[token]]), cache=cache).logits for token in answer]
    result = mx.concatenate(steps, axis=1)
    mx.eval(result)
    return result


def forget(model: Any) -> None:
    """Resets the positions that mlx-vlm keeps on a model from the request before."""
    for name in ("_position_ids", "_rope_deltas"):
        if hasattr(model.language_model, name):
            setattr(model.language_model, name, None)
