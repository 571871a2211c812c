"""Assistants and their targets, made for tests."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_map_with_path

import runner.process.lean_mlx_lm  # noqa: F401

from mlx_lm.models.gemma4_text import ModelArgs  # isort: skip

from runner.drafts.assistant import (
    Assistant,
    AssistantModule,
    AssistantSizes,
    check_assistant,
    load_assistant,
    places_of,
)
from runner.drafts.kinds import open_draft
from runner.drafts.target import target_of
from runner.model import OpenedModel
from runner.model.weights.loading import LoadedModel, load
from scripts.tools.models.assistants import Config, config_of, weights_of
from scripts.tools.models.checkpoints import write_directory
from scripts.tools.models.tiny import VOCAB, tiny

Arrays = dict[str, mx.array]
Change = Callable[[Arrays], object]


class Pair(NamedTuple):
    loaded: LoadedModel
    assistant: Assistant


def write(directory: Path, config: Config | None = None, change: Change = lambda _: None, seed: int = 0) -> Path:
    """Writes an assistant as it is published, with other tensors, if `change` makes some."""
    config = config or config_of()
    weights = {name: mx.array(array) for name, array in weights_of(config, seed).items()}
    change(weights)
    return write_directory(directory, config, weights)


def pair_of(target: OpenedModel, directory: Path) -> Pair:
    """Loads a target, and the assistant in a directory."""
    opened, loaded = open_draft(str(directory), directory).model, load(target)
    check_assistant(opened, target, loaded)
    return Pair(loaded, load_assistant(opened, loaded).assistant)


def tiny_assistant(groups: int = 0, chosen: int = 0) -> Assistant:
    """Returns a random one for the engine's tiny Gemma 4, which scores all tokens or those of chosen groups."""
    target = LoadedModel(cast("Module", tiny("gemma4").model))
    args = ModelArgs(
        hidden_size=48,
        num_hidden_layers=3,
        intermediate_size=64,
        num_attention_heads=2,
        head_dim=8,
        global_head_dim=16,
        vocab_size=VOCAB,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    mx.random.seed(3)
    module = AssistantModule(args, AssistantSizes(32, groups, chosen), tied=True)
    module.update(
        tree_map_with_path(
            lambda _, fresh: mx.random.normal(fresh.shape, scale=fresh.shape[-1] ** -0.5) if fresh.ndim > 1 else fresh,
            module.parameters(),  # type: ignore[no-untyped-call]
        )
    )
    kinds = frozenset(args.layer_types or ())
    return Assistant(module, target_of(target), places_of(target.module), kinds)
