"""What is asked of an architecture over several ranks: whether it can be split, from its headers alone."""

import importlib
import math

import mlx.core as mx
from mlx.nn.layers.base import Module

from runner.model.weights.assembly import rehearse
from runner.model.weights.parameters import parameters_of
from runner.ranks.split import part_of, possible_ranks, shapes_of, split_fault
from tests.model.architectures.subject import Subject
from tests.model.ranks.jobs import Outcome

LATENT = frozenset(
    (
        *("deepseek_v3", "deepseek_v32", "deepseek_v41", "glm4_moe_lite", "glm_moe_dsa", "kimi_k25", "longcat_flash"),
        *("longcat_flash_ngram", "mistral4"),
    )
)
"""Every rank keeps all of their keys and values."""
MIXED = frozenset(("kimi_k3", "minimax_m3_vl"))
"""Every rank keeps a part of some layers' state, and all of others'."""

TOLERANCE = 1e-4
"""Of the largest score. Splitting rounds sums otherwise, as batches do."""


def can_split(name: str) -> bool:
    return hasattr(importlib.import_module(f"mlx_lm.models.{name}").Model, "shard")


def kv_share(whole: Module, ranks: int) -> float:
    """The share of the layers' state that one rank holds; 1 with latent attention, which is not cut."""
    (_, all_states), (_, states) = shapes_of(whole), shapes_of(part_of(whole, ranks, 0), ranks)
    return sum(map(math.prod, states)) / sum(map(math.prod, all_states))


def can_be_split_over_two_ranks_or_says_why_not(it: Subject) -> None:
    """And nothing is computed to find that out."""
    whole, _ = rehearse(it.opened)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    numbers, fault = possible_ranks(it.opened, whole), split_fault(it.opened, 2, whole)
    assert mx.get_peak_memory() - before < 0.02 * it.opened.total_bytes
    if not can_split(it.name):
        assert fault == f"mlx_lm.models.{it.name} cannot be split over several ranks"
        assert numbers == []
        return
    assert fault == ""
    rank_bytes = sum(array.nbytes for array in parameters_of(part_of(whole, 2, 0)).values())
    assert 0.45 * it.opened.total_bytes < rank_bytes < 0.65 * it.opened.total_bytes
    if it.name in MIXED:
        assert 0.5 < kv_share(whole, 2) < 1
    else:
        assert kv_share(whole, 2) == (1 if it.name in LATENT else 0.5)
    three = split_fault(it.opened, 3, whole)
    assert three.removesuffix(" or 4") == "4 attention heads cannot be split over 3 ranks: use 2"


def check_equal(both: tuple[list[Outcome], list[mx.array]], wanted: mx.array, tolerance: float = TOLERANCE) -> None:
    """Both ranks have the same bits, which are nearly those of a single process."""
    outcomes, scores = both
    assert [outcome["error"] for outcome in outcomes] == ["", ""]
    first, second = scores
    assert mx.array_equal(first, second)
    assert first.shape == wanted.shape
    assert mx.abs(first - wanted).max() <= tolerance * mx.abs(wanted).max()
    assert mx.array_equal(mx.argmax(first, axis=-1), mx.argmax(wanted, axis=-1))
