"""The perplexity of a real model on a page of English: what unpacked weights and quantized keys and values cost."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from runner.kv_bits.wing import find_format
from runner.model import open_model
from runner.model.weights.loading import LoadedModel, load
from runner.tokenizer import open_tokenizer
from scripts.tools import ROOT
from scripts.tools.real.main import make_model

pytestmark = pytest.mark.real
TOKENS = 2048
TEXT = Path(__file__).parent / "text.txt"  # a README of this project: another text has other perplexities
CHUNK_TOKENS = 128  # several forwards, so that later tokens read keys and values from the cache


@pytest.fixture(scope="module")
def unpacked() -> LoadedModel:
    return load(open_model(str(make_model()), ROOT), "auto")


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    opened = open_model(str(make_model()), ROOT)
    tokenizer = open_tokenizer(opened.checkpoint.file, merge_eos=True)
    return tokenizer.encode(TEXT.read_text())[:TOKENS]


def perplexity(model: LoadedModel, make_layers: Callable[[], list[object]], tokens: list[int]) -> float:
    layers, lost = make_layers(), 0.0
    for at in range(0, len(tokens) - 1, CHUNK_TOKENS):
        wanted = tokens[at + 1 : at + CHUNK_TOKENS + 1]
        logits = model.logits(mx.array([tokens[at : at + len(wanted)]]), layers)[0]
        chosen = mx.take_along_axis(logits, mx.array(wanted)[:, None], axis=1)[:, 0]
        lost += cast("float", (mx.logsumexp(logits, axis=1) - chosen).sum().item())
    return math.exp(lost / (len(tokens) - 1))


@pytest.fixture(scope="module")
def plain(unpacked: LoadedModel, tokens: list[int]) -> float:
    return perplexity(unpacked, unpacked.make_layers, tokens)


@pytest.mark.parametrize(("bits", "lost"), [(8, 0.005), (5, 0.015), (4, 0.05), (3, 0.25)])
def test_quantized_keys_and_values_cost_what_docs_cache_says(
    unpacked: LoadedModel, tokens: list[int], plain: float, bits: int, lost: float
) -> None:
    make_layers, name = find_format(unpacked.make_layers, unpacked.logits, 49152, bits)
    assert name == f"kv{bits}"
    assert 5 < plain < 40
    assert perplexity(unpacked, make_layers, tokens) == pytest.approx(plain, rel=lost)


def test_unpacked_weights_cost_nothing(unpacked: LoadedModel, tokens: list[int]) -> None:
    packed = load(open_model(str(make_model()), ROOT), "float32")
    few = tokens[: CHUNK_TOKENS + 1]
    found, wanted = (perplexity(model, model.make_layers, few) for model in (unpacked, packed))
    assert found == pytest.approx(wanted, rel=1e-4)
