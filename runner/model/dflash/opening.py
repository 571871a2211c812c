"""Opens a DFlash draft by its headers."""

from runner.errors import ModelError
from runner.model.config import read_config
from runner.model.dflash.config import read_dflash_config
from runner.model.families import Family, architecture_of
from runner.model.opened import OpenedModel
from runner.model.packing import check_companions
from runner.model.sources.checkpoint import Checkpoint, Tensor

_FAMILY = Family("dflash")
_NOT_OURS = ("quantization", "quantization_config", "quantize_activations")
"""Fields of `config.json` about how others store the tensors."""
_RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


def is_dflash(opened: OpenedModel) -> bool:
    """Returns True for a DFlash draft, which has no vocabulary and no layers of a text model."""
    return opened.family is _FAMILY


def open_dflash(checkpoint: Checkpoint) -> OpenedModel:
    """Interprets the checkpoint of a DFlash draft. Raises ModelError."""
    config = read_config(checkpoint)
    architecture = architecture_of(config, from_store=checkpoint.from_store)
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
        family=_FAMILY,
        config=config,
        module_config=config,
        tensors=tensors,
        context_length=0,
        vocab_size=read_dflash_config(config, architecture).vocab_size,
        checkpoint=checkpoint,
    )
