"""A loaded model computes the same, bit for bit, as mlx-lm from a directory with the same weights.

The oracle is `mlx_lm.utils.load_model`; its directory is made from the store's blobs by renaming only.
"""

import json
import shutil
import threading
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from runner.model import open_model
from runner.model.weights.loading import LoadedModel, load
from scripts.tools.models.checkpoints import VOCABULARY_SIZE, config_of, make_weights, write_checkpoint, write_weights
from tests.model.loading.conftest import TOKENS, Checkpoints, run, run_path, same


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


# `suppress_tokens` of `generation_config.json`: Gemma 4 lists its image and audio tokens there.


def loaded(directory: Path, tokens: object) -> LoadedModel:
    write_checkpoint(directory, "gemma3_text")
    (directory / "generation_config.json").write_text(json.dumps({"suppress_tokens": tokens}))
    return load(open_model(str(directory), directory))


def scores(model: LoadedModel) -> mx.array:
    return model.logits(mx.array([TOKENS]), model.make_layers())


def argmax(logits: mx.array) -> int:
    return cast("int", mx.argmax(logits[0, -1]).item())


def test_they_are_never_chosen_and_the_others_score_as_before(tmp_path: Path) -> None:
    plain = scores(loaded(tmp_path / "plain", None))
    best = argmax(plain)
    found = scores(loaded(tmp_path / "suppressed", [best, 3]))
    closed = mx.isinf(found).all(axis=(0, 1))
    assert mx.array_equal(closed, (mx.arange(VOCABULARY_SIZE) == best) | (mx.arange(VOCABULARY_SIZE) == 3))
    assert mx.array_equal(mx.where(closed, 0, found), mx.where(closed, 0, plain))
    assert argmax(found) != best
    assert found.dtype == plain.dtype


@pytest.mark.parametrize("tokens", [[-1, VOCABULARY_SIZE, 2.5, "3", None], 7, {}, []])
def test_what_is_no_token_is_passed_over(tokens: object, tmp_path: Path) -> None:
    """One beyond the vocabulary would be written beyond the scores."""
    assert mx.isfinite(scores(loaded(tmp_path, tokens))).all()


def test_a_broken_file_is_the_tokenizers_to_tell(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text("{")
    assert open_model(str(tmp_path), tmp_path).suppressed_tokens == []
