"""Two processes that share a model compute what one does, and both the same bits."""

from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from runner.device import device
from scripts.tools.models.architectures import Values, config
from scripts.tools.models.checkpoints import Kind, make_weights, write_checkpoint, write_directory
from scripts.tools.models.store import write_store
from scripts.tools.models.tensors import Quantization
from tests.model.architectures.splitting import TOLERANCE, can_split, check_equal
from tests.model.architectures.subject import SERVED, Subject
from tests.model.ranks.pair import Pair, alone

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
"""Half a row is a whole number of groups of 64."""
NOISY = dict.fromkeys(("longcat_flash", "longcat_flash_ngram"), 1e-3)
"""Their latents are scaled up, and all rounding with them (`scripts.tools.models.architectures`): 9e-5 was seen."""


@pytest.mark.parametrize("name", [*filter(can_split, SERVED)])
def test_an_architecture_computes_the_same_over_two_ranks(name: str, tmp_path: Path, two: Pair) -> None:
    directory = Subject(name, tmp_path).directory
    both = two.load(directory)
    check_equal(both, alone(directory), NOISY.get(name, TOLERANCE))
    assert {outcome["share_bytes"] for outcome in both[0]} == {both[0][0]["share_bytes"]}


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [("llama", "int4"), ("qwen3", "mxfp8"), ("deepseek_v3", "nvfp4")],
)
def test_packed_weights(kind: Kind, quantization: Quantization, tmp_path: Path, two: Pair) -> None:
    wide = (
        WIDE if kind != "deepseek_v3" else {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64}
    )
    write_store(tmp_path, "packed", write_checkpoint(tmp_path / "source", kind, overrides=wide), quantization)
    both = two.load("packed", tmp_path)
    check_equal(both, alone("packed", tmp_path))
    assert "mlx.core.uint32" in both[0][0]["dtypes"]


def test_repeated_key_heads(tmp_path: Path, two: Pair) -> None:
    """One key head, which both ranks keep."""
    known = config("qwen3_5")
    known["text_config"] = {**cast("Values", known["text_config"]), "num_key_value_heads": 1}
    write_directory(tmp_path, known, make_weights(known, 0, "float32"))
    check_equal(two.load(tmp_path), alone(tmp_path))


def test_keys_and_values_can_be_quantized(tmp_path: Path, two: Pair) -> None:
    bits = 8
    directory = write_checkpoint(tmp_path, "llama", overrides={**WIDE, "head_dim": 64})
    outcomes, (first, second) = two.load(directory, kv_bits=bits)
    for outcome in outcomes:
        assert outcome["layers"] == ["HadamardKVCache"] * 2
        assert {(shape[1], shape[3]) for shape in outcome["state_shapes"]} == {(2, 64 * bits // 32), (2, 1)}
    assert mx.array_equal(first, second)
    wanted = alone(directory)
    assert 0 < mx.abs(first - wanted)[:44].max() <= 0.5 * mx.abs(wanted).max()


@pytest.mark.skipif(device() == "gpu", reason="a GPU keeps 16 bits")
def test_ranks_with_other_budgets_compute_in_the_same_type(tmp_path: Path, two: Pair) -> None:
    """Where one of them has no room for float32, none computes in it."""
    directory = write_checkpoint(tmp_path, "llama", dtype="bfloat16")
    share_bytes = two.load(directory)[0][0]["share_bytes"]
    outcomes, (first, second) = two.load(directory, dtype="auto", budget_bytes=2 * share_bytes, more_bytes=1 << 30)
    assert [outcome["dtypes"] for outcome in outcomes] == [["mlx.core.bfloat16"]] * 2
    assert mx.array_equal(first, second)
    outcomes, _ = two.load(directory, dtype="auto", budget_bytes=4 * share_bytes, more_bytes=1 << 30)
    assert [outcome["dtypes"] for outcome in outcomes] == [["mlx.core.float32"]] * 2
