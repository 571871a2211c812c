"""The less usual forms of packed layers: global scales, quantized activations, ternary weights."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.nn.layers.quantized import QQLinear, QuantizedLinear

import runner.process.lean_mlx_lm  # noqa: F401

# isort: split
from mlx_lm.models.bitlinear_layers import BitLinear

from runner.errors import ModelError
from runner.model import open_model
from runner.model.weights.loading import load
from scripts.tools.models.checkpoints import Kind, config_of, make_weights, write_checkpoint, write_weights
from tests.lib.kernels import mlx_own
from tests.model.loading.conftest import run

FACTOR = 0.5


def written(directory: Path, kind: Kind, weights: dict[str, mx.array], **config: object) -> Path:
    """A checkpoint of `kind` with other weights and more in its config."""
    write_checkpoint(directory, kind)
    write_weights(directory, weights)
    (directory / "config.json").write_text(json.dumps({**config_of(kind), **config}))
    return directory


def with_packed(
    weights: dict[str, mx.array], part: str, mode: str = "nvfp4", factors: mx.array | None = None
) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """`weights` with those whose name has `part` packed, as mlx-lm names them, and with the same numbers unpacked."""
    packed, plain = dict(weights), dict(weights)
    for name in [name for name in weights if part in name]:
        stem = name.removesuffix(".weight")
        words, scales, *_ = mx.quantize(weights[name], mode=mode)
        packed |= {name: words, f"{stem}.scales": scales}
        plain[name] = mx.dequantize(words, scales, mode=mode, dtype=mx.float32)
        if factors is not None:
            packed[f"{stem}.global_scale"] = factors * 2688
            plain[name] = plain[name] * factors.reshape(-1, *[1] * (words.ndim - 1))
    return packed, plain


@pytest.mark.parametrize(("part", "count"), [(".switch_mlp.", 4), (".q_proj.", 1)])
@mlx_own()
def test_a_global_scale_of_mlxs_kind_multiplies_each_experts_product(part: str, count: int, tmp_path: Path) -> None:
    """Like `mlx_lm.convert`, stores the largest weight, 2688 times the factor."""
    weights = make_weights(config_of("qwen3_next"), 0, "float32")
    factors = mx.array([1.0, 2.0, 0.25, 0.5][:count])
    packed, plain = with_packed(weights, part, factors=factors if count > 1 else factors * FACTOR)
    found = load(open_model(str(written(tmp_path / "packed", "qwen3_next", packed)), tmp_path))
    wanted = load(open_model(str(written(tmp_path / "plain", "qwen3_next", plain)), tmp_path))
    assert mx.allclose(run(found), run(wanted), atol=1e-5)
    without = {name: array for name, array in packed.items() if not name.endswith(".global_scale")}
    unscaled = load(open_model(str(written(tmp_path / "unscaled", "qwen3_next", without)), tmp_path))
    assert not mx.allclose(run(found), run(unscaled), atol=1e-3)


def test_a_global_scale_of_an_embedding_is_refused(tmp_path: Path) -> None:
    weights = make_weights(config_of("llama"), 0, "float32")
    packed, _ = with_packed(weights, "embed_tokens", factors=mx.array([FACTOR]))
    directory = written(tmp_path / "packed", "llama", packed)
    with pytest.raises(ModelError, match=r"embed_tokens\.weight: a global scale needs a packed linear layer"):
        load(open_model(str(directory), tmp_path))


def activations(tmp_path: Path, mode: str = "mxfp8") -> Path:
    packed, _ = with_packed(make_weights(config_of("llama"), 0, "float32"), "_proj.", mode)
    return written(tmp_path / mode, "llama", packed, quantize_activations=True)


def test_quantized_activations_are_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX has no such product on CPUs, where only the weights are quantized."""
    opened = open_model(str(activations(tmp_path)), tmp_path)
    on_cpu = load(opened)
    assert type(on_cpu.module.layers[0].mlp.up_proj) is QuantizedLinear
    assert mx.isfinite(run(on_cpu)).all()
    monkeypatch.setattr("runner.model.weights.quantized_layers.mx.default_device", lambda: mx.Device(mx.gpu))
    on_gpu = load(opened)
    layer = on_gpu.module.layers[0].mlp.up_proj
    assert type(layer) is QQLinear
    assert mx.array_equal(layer.weight, on_cpu.module.layers[0].mlp.up_proj.weight)


def test_activations_of_a_type_without_such_a_product_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.model.weights.quantized_layers.mx.default_device", lambda: mx.Device(mx.gpu))
    with pytest.raises(ModelError, match=r"_proj\.weight: quantize_activations wants nvfp4 or mxfp8 .* found mxfp4"):
        load(open_model(str(activations(tmp_path, "mxfp4")), tmp_path))


def test_ternary_weights_are_for_metal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make_weights(config_of("llama"), 0, "bfloat16")
    for name in [name for name in weights if "_proj." in name]:
        out_dims, in_dims = weights[name].shape
        stem = name.removesuffix(".weight")
        weights |= {
            name: mx.arange(out_dims // 4 * in_dims).astype(mx.uint8).reshape(-1, in_dims),
            f"{stem}.weight_scale": mx.array([FACTOR], mx.bfloat16),
        }
    quantization = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}
    opened = open_model(str(written(tmp_path / "b", "llama", weights, quantization_config=quantization)), tmp_path)
    monkeypatch.setattr("runner.model.weights.quantized_layers.mx.metal.is_available", lambda: False)
    with pytest.raises(ModelError, match=r"^unsupported architecture: LlamaForCausalLM runs on .*Metal"):
        load(opened)
    monkeypatch.setattr("runner.model.weights.quantized_layers.mx.metal.is_available", lambda: True)
    layer = load(opened).module.layers[1].self_attn.q_proj
    assert type(layer) is BitLinear
    assert mx.array_equal(layer.weight, weights["model.layers.1.self_attn.q_proj.weight"])
    assert layer.weight_scale.tolist() == [FACTOR]
