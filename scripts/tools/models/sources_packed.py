"""Checkpoints that were packed before Ollama saw them: by mlx-lm's converter, by ModelOpt, by compressed-tensors."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from scripts.tools.models.checkpoints import BOS, EOS, make_weights, write_directory
from scripts.tools.models.sources_form import Config
from scripts.tools.models.sources_steps import Weights
from scripts.tools.models.tensors import PACKINGS, Packing, Tensor, from_mlx, read_tensors, safetensors_bytes

Producer = Literal["modelopt", "compressed-tensors"]
_NVFP4 = PACKINGS["nvfp4"]


def write_converted(
    directory: Path,
    config: Config,
    packing: Packing,
    *,
    says_mode: bool = True,
    others: Mapping[str, Packing | None] | None = None,
) -> Path:
    """A model as `mlx_lm.convert -q` writes it: mlx-lm's names, what can be packed is.

    `others` are packings of layers whose path ends so; None leaves them dense. Old conversions do not say the mode.
    """
    import mlx_lm.utils

    module_class, args_class = mlx_lm.utils._get_classes(config)
    module = module_class(args_class.from_dict(json.loads(json.dumps(config))))
    predicate = getattr(module, "quant_predicate", None) or (lambda path, layer: True)
    weights = make_weights(config, 0, "float32")
    said: dict[str, object] = {"group_size": packing.group_size, "bits": packing.bits}
    if says_mode:
        said["mode"] = packing.mode
    leaves = tree_flatten(module.leaf_modules(), is_leaf=Module.is_module)
    for path, layer in cast("list[tuple[str, Module]]", leaves):
        used = _packing_of(path, layer, packing, predicate, others or {})
        name = f"{path}.weight"
        if used is None or name not in weights or weights[name].shape[-1] % used.group_size:
            continue
        parts = mx.quantize(weights[name], used.group_size, used.bits, mode=used.mode)
        weights |= {f"{path}.{key}": part for key, part in zip(("weight", "scales", "biases"), parts, strict=False)}
        if used != packing:
            said[path] = used._asdict() if says_mode else {"group_size": used.group_size, "bits": used.bits}
    known = {"bos_token_id": BOS, "eos_token_id": EOS, "quantization": said, "quantization_config": said}
    return write_directory(directory, {**config, **known}, weights)


def _packing_of(
    path: str,
    layer: Module,
    packing: Packing,
    predicate: Callable[[str, Module], bool | dict[str, int]],
    others: Mapping[str, Packing | None],
) -> Packing | None:
    if not hasattr(layer, "to_quantized"):
        return None
    for ending, other in others.items():
        if path.endswith(ending):
            return other
    wanted = predicate(path, layer)
    if isinstance(wanted, dict):
        return Packing(wanted["group_size"], wanted["bits"], "affine")
    return packing if wanted else None


def factor_of(name: str, *, powers_of_two: bool) -> float:
    """The global scale of the tensor `name`: another one for every tensor, other experts' included."""
    place = sum(name.encode())
    return 2.0 ** (place % 7 - 5) if powers_of_two else 0.03 * (1 + place % 29)


def write_nvidia(
    directory: Path, source_dir: Path, producer: Producer, wanted: Callable[[str], bool], factor: Callable[[str], float]
) -> Path:
    """The published model in `source_dir` with the matrices that are `wanted` in nvfp4, as NVIDIA's tools export it.

    The number in the file is the factor of the whole tensor (ModelOpt), or one by it (compressed-tensors).
    """
    directory.mkdir(parents=True)
    arrays = cast("Weights", mx.load(str(source_dir / "model.safetensors")))
    tensors = read_tensors(source_dir / "model.safetensors")
    for name, array in arrays.items():
        if not wanted(name):
            continue
        del tensors[name]
        stem, number = name.removesuffix(".weight"), factor(name)
        words, scales = mx.quantize(array / number, _NVFP4.group_size, _NVFP4.bits, mode=_NVFP4.mode)[:2]
        scalar = mx.array([number if producer == "modelopt" else 1 / number])
        parts = from_mlx({"words": words.view(mx.uint8), "scales": scales, "scalar": scalar})
        packed = {"words": parts["words"], "scales": parts["scales"]._replace(dtype="F8_E4M3")}
        tensors |= _named(stem, packed, parts["scalar"], producer)
    (directory / "model.safetensors").write_bytes(safetensors_bytes(dict(sorted(tensors.items()))))
    config = json.loads((source_dir / "config.json").read_text())
    for file in source_dir.glob("*.json"):
        (directory / file.name).write_bytes(file.read_bytes())
    config["quantization_config"] = {"quant_method": producer, "quant_algo": "NVFP4", "bits": 4, "group_size": 16}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _named(stem: str, packed: Mapping[str, Tensor], scalar: Tensor, producer: Producer) -> dict[str, Tensor]:
    """The scales of activations go with the weights; nobody needs them here."""
    if producer == "modelopt":
        scalar = scalar._replace(shape=())
        return {
            f"{stem}.weight": packed["words"],
            f"{stem}.weight_scale": packed["scales"],
            f"{stem}.weight_scale_2": scalar,
            f"{stem}.input_scale": scalar,
        }
    return {
        f"{stem}.weight_packed": packed["words"],
        f"{stem}.weight_scale": packed["scales"],
        f"{stem}.weight_global_scale": scalar,
        f"{stem}.input_global_scale": scalar,
    }
