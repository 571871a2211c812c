"""The reference for a stored model: the same model as mlx-lm opens it from a directory in its own form.

Numbers that were packed before they were renamed, stacked and split must be those that are packed afterwards: rows keep
their groups. Where a source says that this does not hold, or a layer has no packed class, the module has the numbers
that the packing left, unpacked.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from scripts.tools.models.checkpoints import write_directory
from scripts.tools.models.sources import SOURCES, undone
from scripts.tools.models.sources_form import Config, Source
from scripts.tools.models.sources_steps import Weights
from scripts.tools.models.tensors import Packing, rounded


def oracle(directory: Path, name: str, source_dir: Path, packings: Mapping[str, Packing] | None = None) -> Module:
    """mlx-lm's module for the source called `name`, whose published directory is `source_dir`.

    `packings` are those of its published tensors. `directory` is made for mlx-lm, where it needs one of its own.
    """
    source = SOURCES[name]
    weights = cast("Weights", mx.load(str(source_dir / "model.safetensors")))
    if packings:
        return load_directory(_packed_directory(directory, source, weights, packings))
    if source.undo is None:
        return load_directory(source_dir)
    return load_directory(write_directory(directory, *undone(source, weights)))


def load_directory(directory: Path) -> Module:
    """Returns the model that `mlx_lm.utils.load_model` makes of a directory."""
    import mlx_lm.utils  # slow: it brings transformers

    module, _ = mlx_lm.utils.load_model(directory)
    assert isinstance(module, Module)
    return module


def _packed_directory(directory: Path, source: Source, weights: Weights, packings: Mapping[str, Packing]) -> Path:
    left = {name: rounded(array, packings[name]) if name in packings else array for name, array in weights.items()}
    config, exact, layers = _sanitized(*undone(source, weights))
    _, coarse, _ = _sanitized(*undone(source, left))
    quantization: dict[str, object] = {"group_size": 64, "bits": 4, "mode": "affine"}
    result: Weights = {}
    for name, array in coarse.items():
        path = name.removesuffix(".weight")
        layer = layers.get(path) if path != name else None
        untouched = mx.array_equal(exact[name], array)
        if untouched or not hasattr(layer, "to_quantized") or path.endswith(source.dense):
            result[name] = array
            continue
        packing = _explanation(exact[name], array, set(packings.values()))
        parts = mx.quantize(exact[name], packing.group_size, packing.bits, mode=packing.mode)
        result |= {f"{path}.{key}": part for key, part in zip(("weight", "scales", "biases"), parts, strict=False)}
        quantization[path] = {**packing._asdict()}
    return write_directory(directory, {**config, "quantization": quantization}, result)


def _sanitized(config: Config, weights: Weights) -> tuple[Config, Weights, dict[str, Module]]:
    """`config` as a converter writes it, the tensors by the module's names, and its layers by their paths."""
    import mlx_lm.utils

    config = {key: value for key, value in config.items() if key != "quantization_config"}
    module_class, args_class = mlx_lm.utils._get_classes(config)
    module = module_class(args_class.from_dict(copy.deepcopy(config)))
    if hasattr(module, "sanitize"):
        # A few multiply in place: what they get must be nobody else's.
        weights = dict(module.sanitize({name: mx.array(array) for name, array in weights.items()}))
    layers = tree_flatten(module.leaf_modules(), is_leaf=Module.is_module)
    return config, weights, dict(cast("list[tuple[str, Module]]", layers))


def _explanation(exact: mx.array, coarse: mx.array, packings: set[Packing]) -> Packing:
    """The one of `packings` that makes `coarse` of `exact`."""
    for packing in sorted(packings):
        if exact.shape[-1] % packing.group_size == 0 and mx.array_equal(rounded(exact, packing), coarse):
            return packing
    raise AssertionError(f"numbers {list(exact.shape)} were changed by more than a packing")
