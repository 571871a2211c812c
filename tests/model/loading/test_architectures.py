"""Every architecture of the installed mlx-lm loads: from a directory, from a store, and from a quantized store.

The oracle is `mlx_lm.utils.load_model` of the directory; for packed tensors, that module with exactly these layers
quantized by MLX, or with the unpacked values where a layer has no packed class.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from runner.errors import ModelError
from runner.model import open_model
from runner.model.weights.load import load
from scripts.tools.models.architectures import architectures, config, make_module, unserved
from scripts.tools.models.checkpoints import TOKENIZER, write_weights
from scripts.tools.models.store import PACKINGS, Quantization, Store, write_store
from scripts.tools.models.store import quantize as quantize_tensor
from scripts.tools.models.tensors import Packing, rounded

SERVED = [name for name in architectures() if name not in unserved()]
TOKENS = [(7 * index + index * index) % 64 for index in range(44)]
"""More tokens than the windows and chunks of the tiny models."""

# What the oracle itself cannot do, not the loader.
NOT_COMPARED = {
    "afm7": "its layers know affine packings only",
    "baichuan_m1": "its sanitize normalizes lm_head, before the oracle packs it; see the test below",
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
    """Writes the tiny model `name`, under mlx-lm's names, with an architecture that is in no table."""
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


@pytest.mark.parametrize(("name", "axis", "fields"), [("baichuan_m1", 1, {}), ("bailing_moe", 0, {"norm_head": True})])
def test_a_packed_head_that_its_module_normalizes_has_the_length_1(
    name: str, axis: int, fields: Mapping[str, object], directory: Path, tmp_path: Path
) -> None:
    """Their sanitize divides and casts back: of packed words, zeros would be left."""
    (directory / "config.json").write_text(
        json.dumps({**json.loads((directory / "config.json").read_text()), **fields})
    )
    store = write_store(tmp_path, "m", directory, "mxfp8")
    assert "lm_head" in packed(store)
    head = load(open_model("m", tmp_path)).module.lm_head.weight.astype(mx.float32)
    assert mx.allclose(mx.linalg.norm(head, axis=axis), mx.ones(head.shape[1 - axis]), atol=0.01)


@pytest.mark.parametrize("name", ["kimi_k3"])
def test_projections_of_different_packings_that_a_module_joins_are_unpacked(
    name: str, directory: Path, tmp_path: Path
) -> None:
    """Ollama gives k and v more bits than q."""
    plain: dict[str, mx.array] = {}
    for path, array in cast("list[tuple[str, mx.array]]", tree_flatten(make_module(name).parameters())):
        joined = path.endswith("self_attn.qkv_proj.weight")
        parts = cast("list[mx.array]", mx.split(array, 3)) if joined else [array]
        names = [path.replace("qkv_proj", f"{part}_proj") for part in "qkv"] if len(parts) > 1 else [path]
        plain |= dict(zip(names, parts, strict=True))
    write_weights(directory, plain)
    store = write_store(tmp_path, "m", directory)
    count = 0
    for path, bits in [(path, 4 if ".q_proj" in path else 8) for path in plain if re.search(r"\.[qkv]_proj\.", path)]:
        if f"{path.rpartition('.self_attn')[0]}.self_attn.k_proj.weight" in plain and path.endswith("weight"):
            packing = Packing(32, bits, "affine")
            store.put_tensors(path, quantize_tensor(store.tensors(path)[path], path, packing))
            plain[path] = rounded(plain[path], packing)
            count += 1
    assert count >= 3
    write_weights(directory, plain)
    assert mx.allclose(loaded("m", tmp_path), run(oracle(directory)), atol=1e-4)


@pytest.mark.parametrize("name", sorted(unserved()))
def test_what_cannot_run_here_is_refused_before_it_is_read(name: str, tmp_path: Path) -> None:
    write_weights(tmp_path, {"model.norm.weight": mx.zeros((64,))})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "architectures": [f"{name}X"]}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    with pytest.raises(ModelError, match=f"^unsupported architecture: {name}X"):
        load(open_model(str(tmp_path), tmp_path))
