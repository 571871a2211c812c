"""Heads that cannot be used: they cost drafts and one line of the log, never the model."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from runner.drafts.heads.head_plan import load_head
from runner.model.weights.loading import load
from scripts.tools.models.checkpoints import write_directory
from scripts.tools.models.sources import Published
from scripts.tools.models.sources_form import read_config
from scripts.tools.models.sources_steps import Weights
from tests.model.drafts.heads.test_head_values import check
from tests.model.loading.conftest import run
from tests.model.loading.stored import Stored, put

Change = Callable[[Weights], object]
LAYER = "mtp.layers.0"


def changed(root: Path, published: Published, name: str, change: Change) -> Stored:
    """Stores a published model with other tensors."""
    source = published(name)
    weights = cast("Weights", mx.load(str(source / "model.safetensors")))
    change(weights)
    return put(root, name, write_directory(root / "source", read_config(source), weights))


def named(*changes: tuple[str, str]) -> Change:
    def change(weights: Weights) -> None:
        for old, new in changes:
            weights[new] = weights.pop(old)

    return change


def dense(layer: str) -> Change:
    """Puts plain projections in place of a layer's experts."""

    def change(weights: Weights) -> None:
        for name in [name for name in weights if name.startswith(f"{layer}.mixer.")]:
            del weights[name]
        weights[f"{layer}.mixer.up_proj.weight"] = mx.random.normal((128, 64)) / 8
        weights[f"{layer}.mixer.down_proj.weight"] = mx.random.normal((64, 128)) / 8

    return change


def without(*endings: str) -> Change:
    def change(weights: Weights) -> None:
        for name in [name for name in weights if "mtp." in name and name.endswith(endings)]:
            del weights[name]

    return change


def only(layer: int) -> Change:
    """Leaves this one of two layers."""

    def change(weights: Weights) -> None:
        kept = {
            name.replace(f"layers.{1 - layer}.", f"layers.{layer}."): array
            for name, array in weights.items()
            if name.endswith(("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight"))
        }
        for name in [name for name in weights if name.startswith(f"mtp.layers.{1 - layer}.")]:
            del weights[name]
        weights.update(kept)

    return change


VARIANTS: dict[str, Change] = {
    "names of others": named(
        ("mtp.layers.0.enorm.weight", "mtp.pre_fc_norm_embedding.weight"),
        ("mtp.layers.0.hnorm.weight", "mtp.pre_fc_norm_hidden.weight"),
        ("mtp.layers.0.eh_proj.weight", "mtp.fc.weight"),
        ("mtp.layers.1.final_layernorm.weight", "mtp.norm.weight"),
    ),
    "plain projections": dense("mtp.layers.1"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_nemotrons_head_are_read(variant: str, published: Published, tmp_path: Path) -> None:
    check(changed(tmp_path, published, "nemotron-h", VARIANTS[variant]), 1e-5)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_head_may_be_one_layer_of_any_kind(layer: int, published: Published, tmp_path: Path) -> None:
    """The second one has experts alone, and no cache."""
    stored = changed(tmp_path, published, "nemotron-h", only(layer))
    opened = stored.open()
    drafter = load_head(opened, load(opened))
    assert drafter is not None
    head = drafter.head
    assert len(head.make_layers()) == 1 - layer
    hidden, layers = mx.random.normal((1, 5, 64)), head.make_layers()
    at_once = head.states(hidden, mx.array([[1, 2, 3, 4, 5]]), head.make_layers())
    steps = [head.states(hidden[:, i : i + 1], mx.array([[i + 1]]), layers) for i in range(5)]
    assert mx.allclose(at_once, mx.concatenate(steps, axis=1), atol=1e-5)


def put_tensor(name: str, *shape: int) -> Change:
    return lambda weights: weights.update({name: mx.zeros(shape)})


FAULTS: dict[str, tuple[str, Change, str]] = {
    "no head": ("qwen3.5", without(""), ""),
    "a part of one": ("qwen3.5", without("fc.weight"), ""),
    "a matrix less": ("qwen3.5", without("self_attn.o_proj.weight"), "lacks 1 tensors: layers.0.self_attn.o_proj"),
    "another width": ("qwen3.5", put_tensor("mtp.fc.weight", 64, 64), "want shape [64, 128], found [64, 64]"),
    "a hundred layers": ("qwen3.5", put_tensor("mtp.layers.99.mlp.weight", 4), "most of its 100 layers are missing"),
    "no layers": ("nemotron-h", lambda weights: named(("mtp.layers.0.eh_proj.weight", "mtp.fc.weight"))(weights)
        or [weights.pop(name) for name in list(weights) if "mtp.layers" in name], "it has no layers"),
    "a recurrent layer": ("nemotron-h", lambda weights: (without("k_proj.weight", "q_proj.weight", "v_proj.weight",
        "o_proj.weight")(weights), put_tensor("mtp.layers.0.mixer.in_proj.weight", 64, 64)(weights)),
        "one of its layers is recurrent"),
    "a layer of nothing": ("nemotron-h", put_tensor("mtp.layers.7.norm.weight", 64),
        "one of its layers is of an unknown kind"),
    "two of one": ("nemotron-h", lambda weights: weights.update(
        {"mtp.enorm.weight": weights["mtp.layers.0.enorm.weight"]}), "two of its tensors are the same parameter"),
}  # fmt: skip


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Why heads could not be used, by the log."""
    return [vars(record)["attributes"]["why"] for record in caplog.records if "cannot be used" in record.message]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_head_costs_the_head_alone(
    fault: str, published: Published, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And one line of the log, if there is anything of a head."""
    name, change, why = FAULTS[fault]
    opened = changed(tmp_path, published, name, change).open()
    loaded = load(opened)
    before = run(loaded)
    caplog.clear()
    assert load_head(opened, loaded) is None
    assert [why in reason for reason in reasons(caplog)] == [True] * bool(why)
    assert mx.array_equal(run(loaded), before)


@pytest.mark.parametrize(
    ("dtype", "budget_bytes", "why"),
    [("keep", 1000, "the weights take"), ("keep", None, "Error"), ("float32", None, "")],
)
def test_a_head_that_cannot_compute_here_is_left_out(
    dtype: str,
    budget_bytes: int | None,
    why: str,
    published: Published,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """For want of memory, or since a CPU has no experts in 16 bits."""
    stored = put(tmp_path, "qwen3.5-moe", published("qwen3.5-moe", "bfloat16"))
    opened = stored.open()
    loaded = load(opened, dtype)
    assert (load_head(opened, loaded, dtype, budget_bytes) is None) == bool(why)
    assert [why in reason for reason in reasons(caplog)] == [True] * bool(why)
