"""Tiny models as Hugging Face publishes them, one per form that `ollama create` may meet (docs/internals/store.md, 3).

Tensor names, shapes, values and `config.json` are the source's own, not mlx-lm's. Every width is a multiple of 64 and
almost every matrix has 1024 elements or more, so that Ollama's policy quantizes what it quantizes in a large model.
"""

import copy
import math
from pathlib import Path

import mlx.core as mx

from scripts.tools.models.checkpoints import BOS, EOS, TOKENIZER, Dtype, make_weights, write_directory
from scripts.tools.models.sources_form import ENCODERS, SOURCES, Config, Shape, Source
from scripts.tools.models.sources_steps import Weights
from scripts.tools.models.sources_towers import EMBEDDING, HEARING, SEEING, SEEING_GEMMAS
from scripts.tools.models.tokenizers import with_tokens, write_tokenizer

__all__ = ["SOURCES", "Published", "published", "spare_weight", "undone", "write_source"]

_FLOAT32 = ("A_log", "e_score_correction_bias")
"""Tensors that publishers keep in float32, whatever the type of the others."""


def undone(source: Source, weights: Weights) -> tuple[Config, Weights]:
    """The config and tensors of `source` in a form that mlx-lm opens rightly, from its published tensors."""
    if source.undo is None:
        return copy.deepcopy(source.config), dict(weights)
    for step in source.undo:
        weights = step(weights)
    return copy.deepcopy(source.module), dict(weights)


def published(source: Source, dtype: Dtype) -> Weights:
    """The published tensors in `dtype`: equal arguments, equal bytes."""
    weights = make_weights(source.module, 0, "float32")
    for step in source.steps:
        weights = step(weights)
    for name, shape in {**source.spare, **source.leftovers}.items():
        weights[name] = spare_weight(shape) if shape else _bound(name)
    return {name: _cast(name, array, dtype) for name, array in sorted(weights.items())}


def spare_weight(shape: Shape) -> mx.array:
    """Returns random numbers that keep the scale of the inputs of a layer."""
    inputs = math.prod(shape[1:]) if len(shape) > 1 else 1
    return mx.random.normal(shape) / math.sqrt(inputs)


def _bound(name: str) -> mx.array:
    """A number by itself keeps what a linear takes or makes within bounds; these cut something off."""
    return mx.array(-1.5 if name.endswith("_min") else 1.5)


def _cast(name: str, array: mx.array, dtype: Dtype) -> mx.array:
    kept = name.endswith(_FLOAT32) or not mx.issubdtype(array.dtype, mx.floating)
    return mx.contiguous(array) if kept else mx.contiguous(array.astype(getattr(mx, dtype)))


class Published:
    """The directories of sources, each written once below `root`; nobody may change them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, name: str, dtype: Dtype = "float32") -> Path:
        """The directory of the source called `name`, its floats in `dtype`."""
        directory = self._root / f"{name}-{dtype}"
        return directory if directory.exists() else write_source(directory, name, dtype)


def write_source(directory: Path, name: str, dtype: Dtype = "float32") -> Path:
    """Writes the source called `name`, with a tokenizer, into `directory` (made if absent) and returns it.

    It may be one of those with a whole tower, or an encoder.
    """
    source = (SOURCES | ENCODERS | SEEING | SEEING_GEMMAS | HEARING | EMBEDDING)[name]
    config = {**source.config, "torch_dtype": dtype, "bos_token_id": BOS, "eos_token_id": EOS}
    write_directory(directory, config, published(source, dtype))
    write_tokenizer(directory, with_tokens(TOKENIZER, source.tokens))
    return directory
