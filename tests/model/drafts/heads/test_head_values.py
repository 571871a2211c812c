"""Heads loaded from stores compute what the formulas make of the published tensors."""

from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from runner.drafts.heads.head import Head
from runner.drafts.heads.head_plan import load_head, plan_head
from runner.model.weights.loading import load
from scripts.tools.models.layouts import LAYOUTS
from scripts.tools.models.sources import Published
from scripts.tools.models.sources_form import read_config
from scripts.tools.models.tensors import Quantization, rounded
from tests.model.drafts.heads.plain import states
from tests.model.loading.stored import Stored, put

NAMES = (
    "qwen3.5", "qwen3.5-text", "qwen3.5-moe", "qwen3.5-moe-text", "qwen3.5-moe-separate", "qwen3-next",
    "qwen3-next-moe", "qwen3-next-wrapped", "nemotron-h",
)  # fmt: skip
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def head_of(stored: Stored) -> Head:
    opened = stored.open()
    found = load_head(opened, load(opened, "float32"), "float32")
    assert found is not None
    plan = plan_head(opened)
    assert plan is not None
    assert plan.opened.total_bytes == sum(
        blob.nbytes for blob in stored.plan.blobs if any("mtp." in origin for origin in blob.origins)
    )
    return found.head


def check(stored: Stored, tolerance: float) -> None:
    head = head_of(stored)
    weights = cast("dict[str, mx.array]", mx.load(str(stored.source_dir / "model.safetensors")))
    packings = stored.plan.packings
    weights = {name: rounded(array, packings[name]) if name in packings else array for name, array in weights.items()}
    hidden = mx.random.normal((1, len(TOKENS), 64), key=mx.random.key(1))
    embedded = head.target.embed(mx.array([TOKENS]))
    wanted = states(read_config(stored.source_dir), weights, embedded[0].astype(mx.float32), hidden[0])
    at_once = head.states(hidden, mx.array([TOKENS]), head.make_layers())[0]
    layers, steps = head.make_layers(), []
    for begin, end in ((0, 4), (4, 5), (5, 8), (8, 9)):
        steps.append(head.states(hidden[:, begin:end], mx.array([TOKENS[begin:end]]), layers)[0])
    for found in (at_once, mx.concatenate(steps)):
        assert mx.abs(found - wanted).max() < tolerance * mx.abs(wanted).max()


@pytest.mark.parametrize("name", NAMES)
def test_a_head_computes_what_its_formulas_say(name: str, published: Published, tmp_path: Path) -> None:
    check(put(tmp_path, name, published(name)), 1e-5)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("qwen3.5", "int4"),
        ("qwen3.5-moe", "mxfp8"),
        ("qwen3.5-moe-separate", "nvfp4"),
        ("qwen3-next", "int8"),
        ("nemotron-h", "int4"),
    ],
)
def test_a_packed_head_computes_the_same(
    name: str, quantization: Quantization, published: Published, tmp_path: Path
) -> None:
    stored = put(tmp_path, name, published(name), quantization)
    assert any("mtp." in each for each in stored.plan.packings)
    check(stored, 1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_what_older_releases_wrote_is_the_same_head(name: str, published: Published, tmp_path: Path) -> None:
    """0.30 made bfloat16 of everything, and added 1 to some of the norms in it. Releases and types take turns."""
    turn = NAMES.index(name)
    layout = (LAYOUTS["0.30"], LAYOUTS["0.31.2"])[turn % 2]
    quantization: Quantization | None = (None, "int4")[turn // 2 % 2]
    rewritten = layout.qwen != "verbatim" and name.startswith("qwen")
    stored = put(tmp_path, name, published(name, "bfloat16" if rewritten else "float32"), quantization, layout)
    check(stored, 2e-2 if rewritten else 1e-4)
