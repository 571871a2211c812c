"""Opens the model that drafts for another one, by its headers."""

from pathlib import Path

from runner.errors import ModelError
from runner.model.assistant.opening import is_named_assistant, open_assistant
from runner.model.config import read_config
from runner.model.dflash.config import ARCHITECTURES
from runner.model.dflash.opening import open_dflash
from runner.model.families import architecture_of
from runner.model.opened import OpenedModel, find_checkpoint, open_checkpoint
from runner.model.sources.checkpoint import Checkpoint
from runner.model.sources.store import open_stored_draft


def open_draft(model: str, models_dir: Path) -> OpenedModel:
    """Opens `model`, an Ollama name or the path of a directory: a model by itself, an assistant or a DFlash draft.
    Raises ModelError if it cannot be opened, or drafts in another way."""
    return _opened(find_checkpoint(model, models_dir))


def open_own_draft(target: OpenedModel, models_dir: Path) -> OpenedModel:
    """Opens the draft model that lies beside `target` in the store; else as `open_draft`."""
    return _opened(open_stored_draft(target.checkpoint, models_dir))


def _opened(checkpoint: Checkpoint) -> OpenedModel:
    config = read_config(checkpoint)
    architecture = architecture_of(config, from_store=checkpoint.from_store)
    if architecture in ARCHITECTURES:
        return open_dflash(checkpoint)
    if is_named_assistant(architecture, config):
        return open_assistant(checkpoint)
    if "dflash_config" in config:
        raise ModelError(f"{architecture} drafts from what the model has computed, which is not supported yet")
    return open_checkpoint(checkpoint)
