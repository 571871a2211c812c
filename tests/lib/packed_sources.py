"""Checkpoints that were packed before Ollama saw them: by mlx-lm's converter, ModelOpt, compressed-tensors, or their
publishers."""

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from scripts.tools.models.checkpoints import BOS, EOS, make_weights, write_directory
from scripts.tools.models.sources_form import Config, read_config
from scripts.tools.models.sources_steps import Weights
from scripts.tools.models.tensors import PACKINGS, Packing, Tensor, from_mlx, read_tensors, safetensors_bytes

Producer = Literal["modelopt", "compressed-tensors"]
_NVFP4 = PACKINGS["nvfp4"]
_PARTS: Mapping[Producer, tuple[str, ...]] = {
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
}


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
    model = module_class(args_class.from_dict(copy.deepcopy(config)))
    model.load_weights([*make_weights(config, 0, "float32").items()])
    own = getattr(model, "quant_predicate", None)

    def predicate(path: str, layer: Module) -> bool | dict[str, object]:
        for ending, other in (others or {}).items():
            if path.endswith(ending):
                return other._asdict() if other else False
        return own(path, layer) if own else True

    model, whole = mlx_lm.utils.quantize_model(model, config, **packing._asdict(), quant_predicate=predicate)
    if not says_mode:
        for said in (whole["quantization"], *whole["quantization"].values()):
            if isinstance(said, dict):
                said.pop("mode", None)
    known = {"bos_token_id": BOS, "eos_token_id": EOS}
    return write_directory(directory, {**whole, **known}, dict(tree_flatten(model.parameters())))


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
    shutil.copytree(source_dir, directory)
    arrays = cast("Weights", mx.load(str(source_dir / "model.safetensors")))
    tensors = read_tensors(source_dir / "model.safetensors")
    for name, array in arrays.items():
        if not wanted(name):
            continue
        del tensors[name]
        stem, number = name.removesuffix(".weight"), factor(name)
        words, scales = mx.quantize(array / number, _NVFP4.group_size, _NVFP4.bits, mode=_NVFP4.mode)[:2]
        scale = mx.array(number) if producer == "modelopt" else mx.array([1 / number])
        parts = from_mlx({"words": words.view(mx.uint8), "scales": scales, "scale": scale})
        whole = parts["scale"]
        # The scales of activations go with the weights; nobody needs them here.
        stored = (parts["words"], parts["scales"]._replace(dtype="F8_E4M3"), whole, whole)
        tensors |= {f"{stem}.{part}": tensor for part, tensor in zip(_PARTS[producer], stored, strict=True)}
    (directory / "model.safetensors").write_bytes(safetensors_bytes(dict(sorted(tensors.items()))))
    packing = {"quant_method": producer, "quant_algo": "NVFP4", "bits": 4, "group_size": 16}
    config = read_config(source_dir) | {"quantization_config": packing}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def in_fp8(weights: Weights, block: int | None) -> tuple[dict[str, Tensor], Weights]:
    """Returns `weights` with projections in FP8, each with a scale for the tensor or for its blocks; and the numbers
    that they mean."""
    packed, numbers = dict(weights), dict(weights)
    for name in [name for name, array in weights.items() if array.ndim == 2 and name.endswith("_proj.weight")]:
        array, scale = weights[name], mx.array(0.01)
        wide = scale
        if block is not None:
            rows, columns = (mx.arange(size) // block for size in array.shape)
            shape = [-(-size // block) for size in array.shape]
            scale = mx.random.uniform(0.005, 0.02, shape, key=mx.random.key(len(packed)))
            wide = scale[rows][:, columns]
        packed[name] = mx.to_fp8(array / wide)
        packed[f"{name}_scale_inv"] = scale
        packed[name.replace("weight", "activation_scale")] = mx.array(1.0)
        numbers[name] = (mx.from_fp8(packed[name], mx.float32) * wide).astype(mx.bfloat16)
    tensors = from_mlx(packed)
    return {
        name: each._replace(dtype="F8_E4M3") if each.dtype == "U8" else each for name, each in tensors.items()
    }, numbers
