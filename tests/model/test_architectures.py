"""Every architecture of the installed mlx-lm loads: from a directory, from a store, and from a quantized store.

The oracle is `mlx_lm.utils.load_model` of the directory; for packed tensors, that module with exactly these layers
quantized by MLX, or with the unpacked values where a layer has no packed class.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from runner.errors import ModelError
from runner.model import open_model
from runner.model.load import load
from tests.models.architectures import architectures, config, make_module, unserved
from tests.models.checkpoints import TOKENIZER, write_weights
from tests.models.store import PACKINGS, Quantization, Store, write_store

SERVED = [name for name in architectures() if name not in unserved()]
TOKENS = [(7 * index + index * index) % 64 for index in range(44)]
"""Longer than the windows and chunks of the tiny models."""

# What the oracle itself cannot do, not the loader.
NOT_COMPARED = {
    "afm7": "its layers know affine packings only",
    "baichuan_m1": "its sanitize normalizes the rows of lm_head, which the oracle does before it packs them",
    "prism_hadamard_qwen35": "its layers are packed from the start",
}


def run(module: Module) -> mx.array:
    """Scores [1, 46, 64]: a prefill and two decode steps through the layer caches."""
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(module)
    steps = [module(mx.array([tokens]), cache=caches)[..., :64] for tokens in (TOKENS, [3], [5])]
    logits = mx.concatenate(steps, axis=1)
    mx.eval(logits)
    return logits


def oracle(directory: Path) -> Module:
    import mlx_lm.utils  # slow: it brings transformers

    module: Module = mlx_lm.utils.load_model(directory)[0]
    return module


def loaded(model: str, models_dir: Path) -> mx.array:
    return run(load(open_model(model, models_dir)).module)


def same(left: mx.array, right: mx.array) -> bool:
    return bool(mx.array_equal(left, right)) and bool(mx.isfinite(left).all())


@pytest.fixture
def directory(name: str, tmp_path: Path) -> Path:
    """The tiny model called `name`, under mlx-lm's names, of an architecture that no table knows."""
    root = tmp_path / "source"
    root.mkdir()
    write_weights(root, dict(tree_flatten(make_module(name).parameters())))
    (root / "config.json").write_text(json.dumps({**config(name), "model_type": name, "architectures": [f"{name}X"]}))
    (root / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return root


@pytest.mark.parametrize("name", SERVED)
def test_an_architecture_loads_from_a_directory_and_a_store(name: str, directory: Path, tmp_path: Path) -> None:
    expected = run(oracle(directory))
    assert same(loaded(str(directory), tmp_path), expected)
    write_store(tmp_path, "m", directory)
    assert same(loaded("m", tmp_path), expected)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", [name for name in SERVED if name not in NOT_COMPARED])
def test_an_architecture_loads_from_a_quantized_store(
    name: str, quantization: Quantization, directory: Path, tmp_path: Path
) -> None:
    store = write_store(tmp_path, "m", directory, quantization)
    module = oracle(directory)
    assert quantize_as_stored(module, store) > 0
    assert same(loaded("m", tmp_path), run(module))


def quantize_as_stored(module: Module, store: Store) -> int:
    """Gives the layers of `module` the packing that the blobs of `store` declare; returns how many there are."""
    kinds = packed(store)
    leaves = dict(tree_flatten(module.leaf_modules(), is_leaf=Module.is_module))
    for name, kind in kinds.items():
        if not hasattr(leaves.get(name), "to_quantized"):
            arrays = mx.load(str(store.blob_of(f"{name}.weight")), format="safetensors")
            assert isinstance(arrays, dict)
            words, scales = arrays[f"{name}.weight"], arrays[f"{name}.weight.scale"]
            group_size, bits, mode = PACKINGS[kind]
            dense = mx.dequantize(words, scales, None, group_size, bits, mode=mode)
            module.load_weights([(f"{name}.weight", dense)], strict=False)

    def options(path: str, layer: Module) -> bool | dict[str, object]:
        if path not in kinds or not hasattr(layer, "to_quantized"):
            return False
        return PACKINGS[kinds[path]]._asdict()

    quantize(module, class_predicate=options)
    return len(kinds)


def packed(store: Store) -> Mapping[str, str]:
    """The `quant_type` of each packed layer of `store`, by the layer's path."""
    found = {}
    for layer in store.layers:
        name = str(layer["name"])
        if name.endswith(".weight") and f"{name}.scale" in store.tensors(name):
            raw = store.blob_of(name).read_bytes()
            header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
            found[name.removesuffix(".weight")] = header["__metadata__"]["quant_type"]
    return found


@pytest.mark.parametrize("name", sorted(unserved()))
def test_what_cannot_run_here_is_refused_before_it_is_read(name: str, tmp_path: Path) -> None:
    write_weights(tmp_path, {"model.norm.weight": mx.zeros((64,))})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "architectures": [f"{name}X"]}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    with pytest.raises(ModelError, match=f"^unsupported architecture: {name}X"):
        load(open_model(str(tmp_path), tmp_path))
