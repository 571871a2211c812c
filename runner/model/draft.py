"""Opens a model that is to draft for another one."""

from pathlib import Path

from runner.errors import ModelError
from runner.model.config import read_config
from runner.model.families import Config, architecture_of
from runner.model.opened import OpenedModel, find_checkpoint, open_checkpoint
from runner.model.sources.checkpoint import Checkpoint
from runner.model.sources.store import open_stored_draft

_DEPENDENT = frozenset({
    "Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM", "gemma4_assistant", "gemma4_unified_assistant",
    "DFlashDraftModel", "DFlashLagunaForCausalLM", "MuseGlimmerAssistantModel",
})  # fmt: skip
"""Architectures that Ollama knows of models that draft from what another model has computed."""
_DEPENDENT_FIELDS = ("dflash_config", "backbone_hidden_size")


def open_draft(model: str, models_dir: Path) -> OpenedModel:
    """Opens `model`, an Ollama name or the path of a directory. Raises ModelError if it cannot be opened, or if it only
    drafts from what another model has computed."""
    return _opened(find_checkpoint(model, models_dir))


def open_own_draft(target: OpenedModel, models_dir: Path) -> OpenedModel:
    """Opens the draft model that lies beside `target` in the store; else as `open_draft`."""
    return _opened(open_stored_draft(target.checkpoint, models_dir))


def _opened(checkpoint: Checkpoint) -> OpenedModel:
    config = read_config(checkpoint)
    architecture = architecture_of(config, from_store=checkpoint.from_store)
    if _is_dependent(architecture, config):
        raise ModelError(f"{architecture} drafts from what the model has computed, which is not supported yet")
    return open_checkpoint(checkpoint)


def _is_dependent(architecture: str, config: Config) -> bool:
    return architecture in _DEPENDENT or any(field in config for field in _DEPENDENT_FIELDS)
