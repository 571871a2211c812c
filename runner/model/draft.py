"""Opens a model that is to draft for another one."""

from pathlib import Path

from runner.errors import ModelError
from runner.model.config import read_config
from runner.model.dflash.config import ARCHITECTURES, read_dflash_config
from runner.model.families import Config, Family, architecture_of
from runner.model.opened import OpenedModel, find_checkpoint, open_checkpoint
from runner.model.packing import check_companions
from runner.model.sources.checkpoint import Checkpoint, Tensor
from runner.model.sources.store import open_stored_draft

_DEPENDENT = frozenset({
    "Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM", "gemma4_assistant", "gemma4_unified_assistant",
})  # fmt: skip
"""Architectures that Ollama knows of models that draft from what another model has computed, beside DFlash."""
_DEPENDENT_FIELDS = ("dflash_config", "backbone_hidden_size")
_DFLASH = Family("dflash")
_NOT_OURS = ("quantization", "quantization_config", "quantize_activations")
"""Fields of `config.json` about how others store the tensors."""
_RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


def open_draft(model: str, models_dir: Path) -> OpenedModel:
    """Opens `model`, an Ollama name or the path of a directory. Raises ModelError if it cannot be opened, or if it only
    drafts from what another model has computed in a way that is not known here."""
    return _opened(find_checkpoint(model, models_dir))


def open_own_draft(target: OpenedModel, models_dir: Path) -> OpenedModel:
    """Opens the draft model that lies beside `target` in the store; else as `open_draft`."""
    return _opened(open_stored_draft(target.checkpoint, models_dir))


def is_dflash(opened: OpenedModel) -> bool:
    """Returns True for a DFlash draft, which has no vocabulary and no layers of a text model."""
    return opened.family is _DFLASH


def _opened(checkpoint: Checkpoint) -> OpenedModel:
    config = read_config(checkpoint)
    architecture = architecture_of(config, from_store=checkpoint.from_store)
    if architecture in ARCHITECTURES:
        return _opened_dflash(checkpoint, architecture, config)
    if _is_dependent(architecture, config):
        raise ModelError(f"{architecture} drafts from what the model has computed, which is not supported yet")
    return open_checkpoint(checkpoint)


def _is_dependent(architecture: str, config: Config) -> bool:
    return architecture in _DEPENDENT or any(field in config for field in _DEPENDENT_FIELDS)


def _opened_dflash(checkpoint: Checkpoint, architecture: str, config: Config) -> OpenedModel:
    tensors: dict[str, Tensor] = {}
    for tensor in checkpoint.tensors.values():
        check_companions(tensor)
        name = tensor.name.removeprefix("model.")
        for old, new in _RENAMED.items():
            name = name.replace(old, new, 1) if name.startswith(old) else name
        if name in tensors:
            raise ModelError(f"two of its tensors are the same parameter: {name}")
        tensors[name] = tensor._replace(name=name)
    config = {key: value for key, value in config.items() if key not in _NOT_OURS}
    return OpenedModel(
        name=checkpoint.name,
        architecture=architecture,
        family=_DFLASH,
        config=config,
        module_config=config,
        tensors=tensors,
        context_length=0,
        vocab_size=read_dflash_config(config, architecture).vocab_size,
        checkpoint=checkpoint,
    )
