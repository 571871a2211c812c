"""Compares the layers among a model's tensors with the number of layers in its config.

Some families store a multi-token predictor as one more layer after the last. Any other extra layer means that config
and tensors belong to different models. Such a model is refused, because its answers would look almost right.
"""

import re
from collections.abc import Iterable, Mapping

from runner.errors import ModelError
from runner.model.architectures import Config, Family, is_needed
from runner.model.sources.checkpoint import LogicalTensor
from runner.sizes import listed

_LAYER = re.compile(r"((?:(?:model|language_model|backbone)\.)*layers\.(\d+))\.")
_ANYWHERE = re.compile(r"(?:.+\.)?layers\.(\d+)\.")
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_PREDICTOR = re.compile(r".+\.(?:eh_proj|e_proj|h_proj|enorm|hnorm|shared_head|embed_tokens|mtp_\w+)\.")
"""The names of tensors that only a multi-token predictor has: a layer that predicts the token after the next one. The
names are DeepSeek's; all families that store a predictor among the layers use these names."""
_LISTED = 6


def extra_layers(names: Iterable[str], config: Config) -> dict[str, str]:
    """Returns tensor name -> layer name for each tensor in a layer beyond the text model's number of layers."""
    count = config.get("num_hidden_layers")
    if type(count) is not int or count <= 0:
        return {}
    found = ((name, _LAYER.match(name)) for name in names if is_needed(name))
    return {name: match[1] for name, match in found if match and int(match[2]) >= count}


def check_extra_layers(beyond: Mapping[str, str], config: Config) -> None:
    """Raises ModelError if an extra layer is no predictor. `beyond` must be a result of `extra_layers`."""
    predictors = {layer for name, layer in beyond.items() if _PREDICTOR.match(name)}
    stray = sorted(set(beyond.values()) - predictors, key=lambda layer: int(layer.rpartition(".")[2]))
    if stray:
        raise ModelError(
            f"config.json: num_hidden_layers is {config.get('num_hidden_layers')}, but the model holds"
            f" {listed(stray, _LISTED)} too: config and tensors belong to different models"
        )


def check_layer_count(text: Config, family: Family, tensors: Mapping[str, LogicalTensor]) -> None:
    """Raises ModelError if the config counts more layers than the model has: a hostile count would fill the memory."""
    found = {int(match[1]) for match in map(_ANYWHERE.match, tensors) if match}
    for field in _COUNTS:
        wanted = text.get(field)
        if type(wanted) is int and wanted <= 0:
            raise ModelError(f"config.json: invalid {field}: {wanted}")
        # In an unlisted family, layers may have other names, and a few may have no tensors. So only the number of all
        # tensors limits the number of layers.
        if not isinstance(wanted, int) or wanted <= (len(found) if family.is_listed else len(tensors)):
            continue
        missing = next(index for index in range(wanted) if index not in found)
        raise ModelError(f"config.json: {field} is {wanted}, the model holds {len(found)}: layer {missing} is missing")


def check_depths(config: Config, most: int) -> None:
    """Raises ModelError if a number of layers, at any depth of `config`, is below 1 or above `most`."""
    for key, value in config.items():
        if isinstance(value, dict):
            check_depths(value, most)
        elif key in (*_COUNTS, "depth", "layers") and type(value) is int and not 0 < value <= most:
            raise ModelError(f"config.json: {key} is {value}, but the model has only {most} tensors")
