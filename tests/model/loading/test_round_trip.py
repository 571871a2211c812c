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
from scripts.tools.models.checkpoints import Kind, config_of, make_weights, write_checkpoint, write_weights
from scripts.tools.models.store import (
    Quantization,
)
from tests.model.loading.conftest import Checkpoints, run, run_path, same

FAMILIES: tuple[Kind, ...] = ("llama", "qwen3", "gemma3_text", "gemma3")
TYPES: tuple[Quantization | None, ...] = (None, *get_args(Quantization))


def oracle(directory: Path) -> mx.array:
    import mlx_lm.utils  # slow: it brings transformers

    module, _ = mlx_lm.utils.load_model(directory)
    return run(module)


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
