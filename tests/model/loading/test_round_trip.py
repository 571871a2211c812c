"""A loaded model computes the same, bit for bit, as mlx-lm from a directory with the same weights.

The oracle is `mlx_lm.utils.load_model`; its directory is made from the store's blobs by renaming only.
"""

import json
import shutil
import threading
from pathlib import Path
from typing import get_args

import mlx.core as mx
import pytest

from runner.model import open_model
from runner.model.weights.load import load
from scripts.tools.models.checkpoints import CONFIGS, Kind, config_of, make_weights, write_checkpoint, write_weights
from scripts.tools.models.store import (
    PACKINGS,
    Quantization,
    Store,
    Tensor,
    Writer,
    quantize,
    safetensors_bytes,
    write_store,
)
from tests.model.loading.conftest import Checkpoints, run, run_path, same

FAMILIES: tuple[Kind, ...] = ("llama", "qwen3", "gemma3_text", "gemma3")
TYPES: tuple[Quantization | None, ...] = (None, *get_args(Quantization))


def oracle(directory: Path) -> mx.array:
    import mlx_lm.utils  # slow: it brings transformers

    module, _ = mlx_lm.utils.load_model(directory)
    return run(module)


def mlx_directory(store: Store, source: Path, directory: Path) -> Path:
    """Returns the weights of `store` in the layout of mlx-lm's converter."""
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors: dict[str, Tensor] = {}
    for layer in store.layers:
        if layer["mediaType"] == "application/vnd.ollama.image.tensor":
            for key, tensor in store.tensors(str(layer["name"])).items():
                stem = key.replace(".weight.scale", ".scales").replace(".weight.bias", ".biases")
                tensors[stem] = tensor
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    config = json.loads((source / "config.json").read_text())
    if any(name.endswith(".scales") for name in tensors):
        config["quantization"] = {"group_size": 64, "bits": 4, "mode": "affine"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("quantization", TYPES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_store_computes_what_the_directory_does(
    kind: Kind, quantization: Quantization | None, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    store = write_store(tmp_path / "models", kind, checkpoint(kind), quantization)
    directory = mlx_directory(store, checkpoint(kind), tmp_path / "mlx")
    expected = oracle(directory)
    assert same(run_path(kind, store.models_dir), expected)
    assert same(run_path(directory), expected)


@pytest.mark.parametrize("writer", get_args(Writer))
def test_both_of_ollamas_writers_are_read(writer: Writer, checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = checkpoint("qwen3", "bfloat16")
    store = write_store(tmp_path / "models", "q", source, writer=writer)
    assert same(run_path("q", store.models_dir), oracle(source))


def test_quantized_types_differ_from_each_other(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Guards the test above: were packed weights ignored somewhere, all types would agree."""
    results = []
    for quantization in TYPES:
        write_store(tmp_path, f"m:{quantization}", checkpoint("llama"), quantization)
        results.append(run_path(f"m:{quantization}", tmp_path))
    assert not any(same(left, right) for index, left in enumerate(results) for right in results[:index])


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_cache_kind_loads_from_a_directory(kind: Kind, checkpoint: Checkpoints) -> None:
    assert same(run_path(checkpoint(kind)), oracle(checkpoint(kind)))


@pytest.mark.parametrize("kind", ["mamba2", "falcon_h1", "deepseek_v3"])
def test_an_unquantized_store_of_another_family_loads(kind: Kind, checkpoint: Checkpoints, tmp_path: Path) -> None:
    write_store(tmp_path, kind, checkpoint(kind))
    assert same(run_path(kind, tmp_path), oracle(checkpoint(kind)))


@pytest.mark.parametrize(
    ("bits", "group_size"), [(2, 64), (3, 64), (4, 32), (4, 128), (5, 64), (6, 32), (8, 32), (8, 128)]
)
def test_packing_comes_from_shapes_where_metadata_says_nothing(bits: int, group_size: int, tmp_path: Path) -> None:
    """An import of an mlx-lm conversion: `4 bits, 64` looks like `8 bits, 32` by its columns alone."""
    source = converted(tmp_path / "source", bits, group_size)
    write_store(tmp_path / "models", "m", source)
    expected = oracle(source)
    assert same(run_path("m", tmp_path / "models"), expected)
    assert same(run_path(source), expected)


def converted(directory: Path, bits: int, group_size: int, **layer_bits: int) -> Path:
    """A llama as mlx-lm's converter writes it: affine, `layer_bits` for the projections of that name, no `mode`."""
    from mlx_lm.models import llama

    sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
    write_checkpoint(directory, "llama", overrides=sizes)
    config = json.loads((directory / "config.json").read_text())
    module = llama.Model(llama.ModelArgs.from_dict(config))
    weights: dict[str, mx.array] = {}
    for name, array in make_weights(config, 3, "float32").items():
        stem = name.removesuffix(".weight")
        if array.ndim == 2:
            used = layer_bits.get(stem.rpartition(".")[2], bits)
            parts = mx.quantize(array, group_size, used)
            weights |= dict(zip((name, f"{stem}.scales", f"{stem}.biases"), parts, strict=True))
        else:
            weights[name] = array
    assert len(weights) > len(module.parameters())
    write_weights(directory, weights)
    (directory / "config.json").write_text(
        json.dumps({**config, "quantization": {"group_size": group_size, "bits": bits}})
    )
    return directory


def test_mixed_precision_comes_from_shapes_against_metadata(tmp_path: Path) -> None:
    """Ollama's import writes the model-wide type into every blob, also into those of another width."""
    source = converted(tmp_path / "source", 4, 64, down_proj=8, v_proj=6)
    config = json.loads((source / "config.json").read_text())
    config["quantization"]["mode"] = "affine"
    (source / "config.json").write_text(json.dumps(config))
    store = write_store(tmp_path / "models", "m", source)
    blob = store.blob_of("model.layers.0.mlp.down_proj.weight").read_bytes()
    assert b'"quant_type":"int4"' in blob
    assert same(run_path("m", tmp_path / "models"), oracle(source))


def test_a_packed_layer_that_has_no_packed_class_is_unpacked(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Routers: mlx-lm's have no `to_quantized`."""
    name = "model.layers.1.mlp.gate"
    weights = make_weights(config_of("deepseek_v3"), 0, "float32")
    parts = mx.quantize(weights[f"{name}.weight"], 64, 8)
    dense, packed = tmp_path / "dense", tmp_path / "packed"
    for directory in (dense, packed):
        shutil.copytree(checkpoint("deepseek_v3"), directory)
    write_weights(dense, weights | {f"{name}.weight": mx.dequantize(*parts, 64, 8)})
    names = (f"{name}.weight", f"{name}.scales", f"{name}.biases")
    write_weights(packed, weights | dict(zip(names, parts, strict=True)))
    assert same(run_path(packed), oracle(dense))


def awq(array: mx.array, group_size: int) -> dict[str, mx.array]:
    """One layer as AutoAWQ lays it out: word n of a row holds outputs 8n.., in nibbles 0 4 1 5 2 6 3 7."""
    out_dims, in_dims = array.shape
    values = (mx.random.uniform(shape=(in_dims, out_dims), key=mx.random.key(out_dims)) * 16).astype(mx.uint32)
    zeros = (mx.random.uniform(shape=(in_dims // group_size, out_dims), key=mx.random.key(1)) * 16).astype(mx.uint32)

    def words(rows: mx.array) -> mx.array:
        eights = rows.reshape(rows.shape[0], -1, 8)
        packed = sum(eights[..., place] << (4 * nibble) for place, nibble in enumerate((0, 4, 1, 5, 2, 6, 3, 7)))
        assert isinstance(packed, mx.array)
        return packed.view(mx.int32)

    scales = mx.random.uniform(0.005, 0.01, zeros.shape, key=mx.random.key(2)).astype(mx.float16)
    return {"qweight": words(values), "qzeros": words(zeros), "scales": scales}


@pytest.mark.parametrize("with_zeros", [True, False])
def test_an_awq_directory_loads(with_zeros: bool, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "awq", "llama")
    config = json.loads((directory / "config.json").read_text())
    weights: dict[str, mx.array] = {}
    for name, array in make_weights(config, 0, "float32").items():
        if name.endswith("_proj.weight"):
            parts = awq(array, 32)
            if not with_zeros:
                del parts["qzeros"]
            weights |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
        else:
            weights[name] = array
    write_weights(directory, weights)
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 32}
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    result = run_path(directory)
    assert same(result, oracle(directory))
    assert result.dtype == mx.float16


def test_a_global_scale_multiplies_the_product(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """nvfp4 as NVIDIA exports it. A power of two commutes with rounding, so the dense model is an exact oracle."""
    factor = 0.25
    name = "model.layers.0.self_attn.q_proj.weight"
    store = write_store(tmp_path / "models", "m", checkpoint("llama"))
    packed = quantize(store.tensors(name)[name], name, PACKINGS["nvfp4"])
    store.put_tensors(name, packed)
    plain = run_path("m", store.models_dir)
    scale = Tensor("F32", (), bytes(memoryview(mx.array(factor).reshape(1).view(mx.uint8))))  # type: ignore[arg-type]  # the stub lacks the buffer protocol
    store.put_tensors(name, packed | {f"{name}.global_scale": scale})
    opened = open_model("m", store.models_dir)
    model = load(opened)
    scaled = run(model)
    assert not same(plain, scaled)
    layer = model.module.model.layers[0].self_attn.q_proj
    x = mx.random.normal((3, 64), key=mx.random.key(0))
    weight = mx.dequantize(layer.weight, layer.scales, None, 16, 4, mode="nvfp4", dtype=mx.float32)
    assert mx.allclose(layer(x), x @ weight.T * factor, atol=1e-5)


def test_the_model_works_on_another_thread_than_the_one_that_loaded_it(checkpoint: Checkpoints) -> None:
    """MLX cannot evaluate another thread's lazy arrays, so this fails if any array is left unevaluated."""
    models = []
    thread = threading.Thread(target=lambda: models.append(load(open_model(str(checkpoint("llama")), Path()))))
    thread.start()
    thread.join()
    assert same(run(models[0]), oracle(checkpoint("llama")))


def test_logits_and_layers_are_those_of_the_module(checkpoint: Checkpoints) -> None:
    model = load(open_model(str(checkpoint("gemma3_text")), Path()))
    layers = model.make_layers()
    logits = model.logits(mx.array([[1, 2, 3]]), layers)
    assert logits.shape == (1, 3, 274)
    assert not model.module.training
    assert [layer.offset for layer in layers] == [3, 3, 3, 3]  # type: ignore[attr-defined]  # mlx-lm's caches have one
    assert mx.array_equal(logits, model.module(mx.array([[1, 2, 3]])))


def test_sharded_directories_load(checkpoint: Checkpoints, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", shards=3)
    assert same(run_path(tmp_path), oracle(checkpoint("llama")))
