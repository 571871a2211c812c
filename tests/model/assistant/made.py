"""Assistants and their targets, made for tests."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from runner.model import OpenedModel
from runner.model.assistant.load import Assistant, check_target, load_assistant
from runner.model.draft import open_draft
from runner.model.weights.load import LoadedModel, load
from scripts.tools.models.assistants import Config, config_of, weights_of
from scripts.tools.models.checkpoints import write_directory

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
    opened, loaded = open_draft(str(directory), directory), load(target)
    check_target(opened, target, loaded.module)
    return Pair(loaded, load_assistant(opened, loaded))
