"""Packed tensors through `sanitize` methods that rename, stack and split, and through some that do more."""

import itertools
from collections.abc import Callable, Mapping
from typing import cast

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.utils import tree_unflatten

from runner.errors import ModelError
from runner.model.packing import AFFINE_BITS, AFFINE_GROUPS, FLOAT_MODES, Packing, find_packing
from runner.model.weights.experts import ExpertLayout, Weights
from runner.model.weights.packed import Arrays, Recipe, find_recipe, sanitize_packed

Change = Callable[[Weights], Weights]
SHAPES = {"int4": (64, 4, "affine"), "int8": (32, 8, "affine"), "nvfp4": (16, 4, "nvfp4"), "mxfp8": (32, 8, "mxfp8")}


def packed(rows: int, columns: int, kind: str, seed: int = 0) -> Arrays:
    group_size, bits, mode = SHAPES[kind]
    weight = mx.random.normal((rows, columns), key=mx.random.key(seed))
    return Arrays(*mx.quantize(weight, group_size, bits, mode=mode))


def found(
    arrays: dict[str, Arrays], change: Change, parameters: Mapping[str, tuple[int, ...]], computed: str = ""
) -> tuple[Recipe, Weights]:
    """Returns the recipe for a module of `parameters`, and its result."""

    def sanitize(weights: Weights, layout: ExpertLayout) -> tuple[Module, Weights]:
        try:
            return made(), change(dict(weights))
        except ValueError as error:
            raise ModelError(str(error)) from error

    def made() -> Module:
        module, zeros = Module(), [(name, mx.zeros(shape)) for name, shape in parameters.items()]
        dict.update(module, cast("dict[str, object]", tree_unflatten(zeros)))
        return module

    recipe = find_recipe(sanitize, arrays, ["as stored"], lambda name: name in computed)
    return recipe, sanitize_packed(sanitize, arrays, recipe)[1]


def dense(arrays: Arrays, kind: str) -> mx.array:
    return arrays.unpacked(Packing(SHAPES[kind][1], SHAPES[kind][0], SHAPES[kind][2]))


@pytest.mark.parametrize("kind", SHAPES)
def test_what_is_renamed_stacked_and_split_stays_packed(kind: str) -> None:
    """Like HunYuan's fused projections and all stacked experts."""

    def change(weights: Weights) -> Weights:
        first, second = mx.split(weights["fused.weight"], 2, axis=0)
        return {"a.weight": first, "b.weight": mx.stack([second, second + 0 if second.ndim == 1 else second])}

    item = packed(64, 128, kind)
    recipe, weights = found({"fused.weight": item}, change, {"a.weight": (32, 128), "b.weight": (2, 32, 128)})
    assert recipe.unpacked == {}
    assert item.scale is not None
    assert mx.array_equal(weights["a.weight"], item.weight[:32])
    assert mx.array_equal(weights["a.scales"], item.scale[:32])
    assert mx.array_equal(weights["b.scales"][1], item.scale[32:])
    assert ("a.biases" in weights) == ("b.biases" in weights) == (kind in ("int4", "int8"))


@pytest.mark.parametrize(
    ("kind", "change", "shape"),
    [
        ("int4", lambda w: {"k.weight": w["kv.weight"].reshape(4, 16, -1).swapaxes(-1, -2)}, (4, 128, 16)),
        ("int8", lambda w: {"k.weight": w["kv.weight"].T}, (128, 64)),
        ("nvfp4", lambda w: {"k.weight": w["kv.weight"].T}, (128, 64)),
        ("mxfp8", lambda w: {"k.weight": w["kv.weight"] * mx.array(0.5)}, (64, 128)),
    ],
)
def test_what_changes_the_packed_axis_is_unpacked_before(kind: str, change: Change, shape: tuple[int, ...]) -> None:
    """Multi-head latent attention, GPT-2 and Falcon-H1. `4 bits, 64` and `8 bits, 32` have the same columns."""
    item = packed(64, 128, kind)
    recipe, weights = found({"kv.weight": item}, change, {"k.weight": shape})
    assert list(recipe.unpacked) == ["kv.weight"]
    assert weights.keys() == {"k.weight"}
    assert mx.array_equal(weights["k.weight"], change({"kv.weight": dense(item, kind)})["k.weight"])


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
def test_what_is_computed_with_and_cast_back_is_unpacked_where_a_table_says_so(kind: str) -> None:
    """Baichuan normalizes `lm_head` and keeps its type, which would turn packed words into zeros."""

    def change(weights: Weights) -> Weights:
        head = weights["lm_head.weight"]
        return {"lm_head.weight": (head / 100).astype(head.dtype)}

    item = packed(64, 128, kind)
    _, weights = found({"lm_head.weight": item}, change, {"lm_head.weight": (64, 128)}, computed="lm_head.weight")
    assert weights.keys() == {"lm_head.weight"}
    assert mx.array_equal(weights["lm_head.weight"], change({"lm_head.weight": dense(item, kind)})["lm_head.weight"])


def test_tensors_that_are_joined_though_they_are_packed_differently_are_unpacked_together() -> None:
    """Kimi K3 joins q, k and v; Ollama gives k and v twice the bits. None of them fits alone."""
    kinds = {"q": "int4", "k": "int8", "v": "int8"}
    arrays = {f"{part}.weight": packed(64, 128, kind) for part, kind in kinds.items()}
    _, weights = found(
        arrays,
        lambda w: {"qkv.weight": mx.concatenate([w[name] for name in arrays])},
        {"qkv.weight": (192, 128)},
        computed=" ".join(arrays),
    )
    assert mx.array_equal(
        weights["qkv.weight"], mx.concatenate([dense(arrays[f"{part}.weight"], kind) for part, kind in kinds.items()])
    )


def test_the_global_scale_follows_its_rows() -> None:
    """Two experts with a factor each; a projection without one gets none."""
    items = [packed(32, 64, "nvfp4", seed)._replace(global_scale=mx.array(2.0**seed)) for seed in (1, 2)]
    arrays = {"e.0.weight": items[0], "e.1.weight": items[1], "o.weight": packed(32, 64, "nvfp4")}

    def change(weights: Weights) -> Weights:
        return {"e.weight": mx.stack([weights["e.0.weight"], weights["e.1.weight"]]), "o.weight": weights["o.weight"]}

    _, weights = found(arrays, change, {"e.weight": (2, 32, 64), "o.weight": (32, 64)})
    assert weights["e.global_scale"].tolist() == [[2.0] * 32, [4.0] * 32]
    assert "o.global_scale" not in weights


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 1, 1), (2, 32)])
def test_a_stack_has_a_global_scale_for_each_expert_or_row(shape: tuple[int, ...]) -> None:
    """Ollama stacked the factors too, before 0.31."""
    parts = mx.quantize(mx.random.normal((2, 32, 64)), mode="nvfp4")
    factors = mx.broadcast_to(mx.array([2.0, 4.0]).reshape(2, *[1] * (len(shape) - 1)), shape)
    _, weights = found({"e.weight": Arrays(*parts, global_scale=factors)}, dict, {"e.weight": (2, 32, 64)})
    assert weights["e.global_scale"].tolist() == [[2.0] * 32, [4.0] * 32]


def test_an_unpacked_tensor_takes_its_global_scale_along() -> None:
    item = packed(32, 64, "nvfp4")
    arrays = {"w.weight": item._replace(global_scale=mx.array([3.0]))}
    _, weights = found(arrays, lambda w: {"w.weight": w["w.weight"].T}, {"w.weight": (64, 32)})
    expected = (dense(item, "nvfp4").astype(mx.float32) * 3).astype(mx.bfloat16)
    assert mx.array_equal(weights["w.weight"], expected.T)


def test_a_method_that_takes_words_but_not_their_scales_is_told() -> None:
    def change(weights: Weights) -> Weights:
        return weights if weights["w.weight"].dtype == mx.uint32 else {}

    with pytest.raises(ModelError, match=r"packed tensors cannot be loaded: sanitize makes w\.weight"):
        found({"w.weight": packed(32, 64, "mxfp8")}, change, {"w.weight": (32, 64)})


# Shapes determine the packing of a tensor uniquely, once the input width is known (docs/internals/store.md, 2.4).

WIDTHS = (128, 384, 5120)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_legal_packing_is_recognized(width: int) -> None:
    for bits, group_size in itertools.product(AFFINE_BITS, AFFINE_GROUPS):
        found = find_packing(width, width * bits // 32, width // group_size, byte_scales=False)
        assert found == Packing(bits, group_size, "affine")
    for (bits, group_size), mode in FLOAT_MODES.items():
        found = find_packing(width, width * bits // 32, width // group_size, byte_scales=True)
        assert found == Packing(bits, group_size, mode)


@pytest.mark.parametrize(
    ("width", "words", "groups", "byte_scales"),
    [
        (64, 8, 0, False),
        (64, 0, 1, False),
        (0, 8, 1, False),
        (64, 14, 1, False),
        (64, 8, 3, False),
        (1040, 260, 32, False),
        (64, 8, 1, True),
        (64, 16, 4, True),
    ],
)
def test_what_no_quantizer_makes_is_none(width: int, words: int, groups: int, byte_scales: bool) -> None:
    assert find_packing(width, words, groups, byte_scales=byte_scales) is None
