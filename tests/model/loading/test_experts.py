"""Layouts of a layer's experts, and stacks restored from their slices without a copy."""

from typing import get_args

import mlx.core as mx
import pytest

from runner.errors import ModelError
from runner.model.architectures import FAMILIES
from runner.model.weights.experts import ExpertLayout, possible_layouts, with_layout

LAYER = "model.layers.3.mlp"
WHOLE = mx.arange(24).reshape(4, 2, 3)


def test_a_stack_comes_apart_under_the_names_of_its_source() -> None:
    with with_layout({f"{LAYER}.experts.up_proj.weight": WHOLE}, "apart") as weights:
        assert list(weights) == [f"{LAYER}.experts.{index}.up_proj.weight" for index in range(4)]
        assert all(mx.array_equal(part, WHOLE[index]) for index, part in enumerate(weights.values()))


def test_the_slices_of_one_stack_in_their_order_are_the_stack_itself() -> None:
    weights = {f"{LAYER}.experts.{name}.weight": WHOLE + shift for shift, name in enumerate(("up_proj", "gate_proj"))}
    with with_layout(weights, "apart") as named:
        found = list(named.values())
        for shift, parts in enumerate((found[:4], found[4:])):
            assert mx.stack(parts) is mx.stack(parts), "nothing is computed"
            assert mx.array_equal(mx.stack(parts), WHOLE + shift)


@pytest.mark.parametrize(("order", "axis"), [([1, 0, 2, 3], 0), ([0, 1, 2], 0), ([0, 1, 2, 3], 1), ([4, 5, 6, 3], 0)])
def test_any_other_stack_is_computed(order: list[int], axis: int) -> None:
    """Another order, a part, another axis, one twice, slices of two stacks."""
    weights = {f"{LAYER}.experts.{name}.weight": WHOLE + shift for shift, name in enumerate(("up_proj", "gate_proj"))}
    with with_layout(weights, "apart") as named:
        chosen = [list(named.values())[index] for index in order]
        result = mx.stack(chosen, axis=axis)
    assert mx.array_equal(result, mx.stack(chosen, axis=axis))


def test_mlx_is_left_as_it_was() -> None:
    genuine = mx.stack

    def fail() -> None:
        with with_layout({}, "apart"):
            assert mx.stack is not genuine
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert mx.stack is genuine


def test_experts_apart_are_stacked_in_the_order_of_their_numbers() -> None:
    weights = {
        f"{LAYER}.experts.{index}.up_proj.weight": mx.full((2, 3), index) for index in (10, 2, *range(2), *range(3, 10))
    }
    with with_layout(weights, "stacked") as named:
        (stack,) = named.values()
        assert list(named) == [f"{LAYER}.switch_mlp.up_proj.weight"]
        assert stack[:, 0, 0].tolist() == list(range(11))


def test_a_missing_expert_is_named() -> None:
    weights = {f"{LAYER}.experts.{index}.up_proj.weight": mx.zeros((2, 3)) for index in (0, 2)}
    missing = rf"expert 1 of {LAYER}\.switch_mlp\.up_proj\.weight is missing"
    with pytest.raises(ModelError, match=missing), with_layout(weights, "stacked"):
        pass


def test_what_is_no_stack_keeps_its_name() -> None:
    weights = {
        f"{LAYER}.experts.e_score_correction_bias": mx.zeros((4,)),
        f"{LAYER}.shared_experts.up_proj.weight": mx.zeros((2, 3)),
        f"{LAYER}.experts.gate_up_proj": mx.zeros((4, 2, 3)),
        "model.layers.0.self_attn.q_proj.weight": mx.zeros((2, 3)),
    }
    assert possible_layouts("llama", weights) == ["as stored"]
    for layout in get_args(ExpertLayout):
        with with_layout(weights, layout) as named:
            assert list(named) == list(weights)


@pytest.mark.parametrize("layout", get_args(ExpertLayout))
def test_a_sanitize_that_changes_arrays_in_place_leaves_them_to_the_next_one(layout: ExpertLayout) -> None:
    """mlx-lm's falcon_h1 multiplies like that."""
    weights = {"model.norm.weight": mx.ones((4,)), f"{LAYER}.experts.up_proj.weight": mx.array(WHOLE)}
    with with_layout(weights, layout) as named:
        for array in named.values():
            array *= 2
    assert mx.array_equal(weights["model.norm.weight"], mx.ones((4,)))
    assert mx.array_equal(weights[f"{LAYER}.experts.up_proj.weight"], WHOLE)


def test_a_new_stack_gets_the_name_that_its_family_gives_it() -> None:
    """Gemma 4 was stored as `moe.experts.0.gate_up_proj.weight`; its module has no `moe`."""
    weights = {f"model.layers.0.moe.experts.{index}.gate_up_proj.weight": mx.zeros((2, 3)) for index in range(2)}
    with with_layout(weights, "stacked", FAMILIES["Gemma4ForCausalLM"].renamed) as named:
        assert list(named) == ["model.layers.0.experts.gate_up_proj"]


@pytest.mark.parametrize(("conv", "layout"), [((8, 1, 4), "apart"), ((8, 4, 1), "stacked")])
def test_qwen3_next_converts_what_is_raw_and_only_that(conv: tuple[int, ...], layout: str) -> None:
    """mlx-lm adds 1 to norms whenever it sees separate experts, even after an import has done so."""
    weights = {f"{LAYER}.experts.up_proj.weight": WHOLE, "model.layers.0.linear_attn.conv1d.weight": mx.zeros(conv)}
    assert possible_layouts("qwen3_next", weights) == [layout]
