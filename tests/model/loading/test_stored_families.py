"""Every published form of every family, as the newest `ollama create` stores it, in every type it packs into.

What is loaded from the store computes bit for bit what mlx-lm computes from a directory. Experts run in float32: MLX's
CPU backend has no other `gather_mm`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import mlx.core as mx
import pytest
from _pytest.mark import ParameterSet

from scripts.tools.models.sources import SOURCES, Published
from scripts.tools.models.store import Quantization, Writer
from tests.model.loading.conftest import run, same
from tests.model.loading.stored import put

TYPES: tuple[Quantization, ...] = get_args(Quantization)
IN_EVERY_TYPE = {"llama", "gemma4-moe", "glm4-moe-lite"}
"""Sources tested with all types every time; the others take turns, and have all types with `--all`."""

PACKED_ALREADY = {"gpt-oss"}
"""Published in mxfp4: `ollama create` would pack the packed bytes again."""
TURNED = {"llama4", "gpt2"}
"""Published with inputs and outputs exchanged."""
FOLDED = {"falcon-h1"}
"""mlx-lm multiplies weights by factors of the config, which no packed tensor follows exactly."""

FLOATING = [
    "llama", "gemma3", "gemma4", "gemma4-unified", "qwen3.5", "qwen3.5-text", "muse-glimmer", "mamba2", "lfm2"
]  # fmt: skip
"""Sources without experts, for bfloat16."""


@pytest.mark.parametrize("name", SOURCES)
def test_a_dense_store_computes_what_the_source_does(name: str, published: Published, tmp_path: Path) -> None:
    stored = put(tmp_path, name, published(name))
    stored.assert_computes_what_the_source_does()
    stored.assert_reads_the_text_model_only()


def packed() -> Iterator[ParameterSet]:
    names = [name for name in SOURCES if name not in PACKED_ALREADY | FOLDED]
    for place, name in enumerate(names):
        for number, quantization in enumerate(TYPES):
            fast = name in IN_EVERY_TYPE or number == place % len(TYPES)
            yield pytest.param(name, quantization, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(("name", "quantization"), list(packed()))
def test_a_packed_store_computes_what_the_source_does(
    name: str, quantization: Quantization, published: Published, tmp_path: Path
) -> None:
    stored = put(tmp_path, name, published(name), quantization)
    assert stored.plan.packings
    if name in TURNED:
        stored.assert_holds_what_the_source_does()
    else:
        stored.assert_computes_what_the_source_does()
    stored.assert_reads_the_text_model_only()


@pytest.mark.parametrize("quantization", TYPES)
@pytest.mark.parametrize("name", sorted(FOLDED))
def test_factors_of_the_config_reach_packed_weights(
    name: str, quantization: Quantization, published: Published, tmp_path: Path
) -> None:
    """Multiplied before or after, rounded to bfloat16 in between or not: all of that may be."""
    found, wanted = (run(module) for module in put(tmp_path, name, published(name), quantization).modules())
    assert found.dtype == wanted.dtype
    assert mx.abs(found - wanted).max() < 0.02 * mx.abs(wanted).max()


@pytest.mark.parametrize("writer", get_args(Writer))
@pytest.mark.parametrize("quantization", [None, "int4", "mxfp4"])
@pytest.mark.parametrize("name", ["gemma4-text", "qwen3.5-moe-separate"])
def test_both_of_ollamas_writers_are_read(
    name: str, quantization: Quantization | None, writer: Writer, published: Published, tmp_path: Path
) -> None:
    put(tmp_path, name, published(name), quantization, writer=writer).assert_computes_what_the_source_does()


@pytest.mark.parametrize("quantization", [None, "int4", pytest.param("mxfp8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FLOATING)
def test_a_store_in_bfloat16_computes_what_the_source_does(
    name: str, quantization: Quantization | None, published: Published, tmp_path: Path
) -> None:
    put(tmp_path, name, published(name, "bfloat16"), quantization).assert_computes_what_the_source_does()


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_store_in_float16_computes_what_the_source_does(
    quantization: Quantization | None, published: Published, tmp_path: Path
) -> None:
    put(tmp_path, "llama", published("llama", "float16"), quantization).assert_computes_what_the_source_does()


def test_types_differ_from_each_other(published: Published, tmp_path: Path) -> None:
    """Guards the tests above: were packed weights ignored on both sides, all types would agree."""
    results = []
    for quantization in (None, *TYPES):
        stored = put(tmp_path / str(quantization), "qwen3.5-moe", published("qwen3.5-moe"), quantization)
        results.append(run(stored.modules()[0]))
    assert not any(same(left, right) for index, left in enumerate(results) for right in results[:index])
