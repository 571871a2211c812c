"""This runner's module for Kolibri 1 has mlx-vlm's logits, Ollama's head and routing, and reads every published layout.

As an architecture among the others it is asked everything in `test_architectures.py`, and in `test_sources.py` as a
published model in every layout of a store.
"""

import importlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.quantized import quantize

import runner.process.lean_mlx_lm  # noqa: F401
from runner.errors import ModelError
from runner.model import open_model
from runner.model.weights.loading import load
from runner.model.weights.parameters import parameters_of
from scripts.tools.models.checkpoints import write_directory
from scripts.tools.models.sources_steps import Weights
from scripts.tools.models.store import write_store
from tests.model.architectures.record import KOLIBRI, apart, check_logits, stored, weights_of

NAME, TIED = KOLIBRI


def published(weights: Weights) -> Weights:
    return {name.replace(".mlp.expert_bias", ".moe.router.expert_bias"): each for name, each in apart(weights).items()}


def together(weights: Weights) -> Weights:
    """Stacks them as Ollama does."""
    return {name.replace("switch_mlp", "experts"): each for name, each in published(weights).items()}


def by_mlx_vlm(weights: Weights) -> Weights:
    """Names them as mlx-vlm's conversions do."""
    old, new = ".mlp.expert_bias", ".mlp.gate.e_score_correction_bias"
    return {f"language_model.{name.replace(old, new)}": each for name, each in weights.items()}


@pytest.mark.parametrize("name", KOLIBRI)
@pytest.mark.parametrize("layout", [published, together, by_mlx_vlm])
def test_logits_are_those_of_mlx_vlm(name: str, layout: Callable[[Weights], Weights], tmp_path: Path) -> None:
    check_logits(stored(tmp_path, KOLIBRI[name], layout(weights_of(name))), name)


def arguments(**fields: object) -> Any:
    module = importlib.import_module("mlx_lm.models.kolibri1")
    return module.ModelArgs.from_dict({**KOLIBRI[NAME], **fields})


def module_of(**fields: object) -> Any:
    return importlib.import_module("mlx_lm.models.kolibri1").Model(arguments(**fields))


def test_every_fifth_layer_sees_all_tokens_unless_a_config_says_otherwise() -> None:
    args = arguments(num_hidden_layers=11, layer_types=None)
    assert [layer for layer, slides in enumerate(args.windows) if not slides] == [4, 9]


def test_layers_that_see_a_window_have_positions_and_others_none() -> None:
    """Without positions, a layer makes the same of equal tokens anywhere."""
    model = module_of()
    x = mx.broadcast_to(mx.random.normal((1, 1, 32), key=mx.random.key(1)), (1, 4, 32))
    for block, slides in zip(model.layers, [False, True, True, False], strict=True):
        queries = block.self_attn.q_norm(block.self_attn.q_proj(x).reshape(1, 4, 4, 16)).swapaxes(1, 2)
        turned = block.self_attn.rope(queries) if slides else queries
        assert block.self_attn.use_rope == slides == (not mx.allclose(turned[..., 0, :], turned[..., 3, :]))


def test_the_bias_of_an_expert_chooses_it_and_weighs_nothing() -> None:
    """Expert 0 has the largest logit, and a bias that keeps it from being chosen."""
    feed = module_of(num_experts=3, num_experts_per_tok=2).layers[0].mlp
    x = mx.ones((1, 1, 32))
    feed.gate.weight = mx.array([[2.0], [1.0], [-1.0]]) * mx.ones((3, 32)) / 32
    feed.expert_bias = mx.array([-5.0, 0.0, 10.0])
    outputs = feed.switch_mlp(x, mx.array([[[1, 2]]]))
    wanted = (outputs * mx.sigmoid(mx.array([1.0, -1.0]))[:, None]).sum(axis=-2) + feed.shared_experts(x)
    assert mx.allclose(feed(x), wanted, rtol=1e-5)
    feed.normalizes = True
    share = mx.sigmoid(mx.array([1.0, -1.0])) / mx.sigmoid(mx.array([1.0, -1.0])).sum()
    assert mx.allclose(feed(x), (outputs * share[:, None]).sum(axis=-2) + feed.shared_experts(x), rtol=1e-5)


def test_experts_are_chosen_in_float32() -> None:
    """In bfloat16 both logits are the same number, and the bias would choose the other expert."""
    feed = module_of(num_experts=2, num_experts_per_tok=1).layers[0].mlp
    feed.gate.weight = mx.zeros((2, 32)).at[mx.array([0, 0, 1]), mx.array([0, 1, 0])].add(1.0)
    feed.set_dtype(mx.bfloat16)
    feed.switch_mlp.set_dtype(mx.float32)  # MLX's CPU backend has no others
    feed.expert_bias = mx.array([0.0, 1 / 1024])
    x = mx.zeros((1, 1, 32)).at[..., mx.array([0, 1])].add(mx.array([1.0, 1 / 512])).astype(mx.bfloat16)
    routed = feed(x) - feed.shared_experts(x)
    first, second = (feed.switch_mlp(x, mx.array([[[each]]]))[..., 0, :] * mx.sigmoid(mx.array(1.0)) for each in (0, 1))
    assert mx.abs(routed - first).max() < 0.1 * mx.abs(routed - second).max()


def test_a_packed_router_multiplies_once() -> None:
    feed = module_of(num_experts=3, num_experts_per_tok=2).layers[0].mlp
    quantize(feed, 32, 8, class_predicate=lambda path, _: path == "gate")
    graph = io.StringIO()
    mx.export_to_dot(graph, feed(mx.ones((1, 1, 32))))
    assert graph.getvalue().count("QuantizedMatmul") == 1


@pytest.mark.parametrize("packing", ["", "affine", "mxfp8"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_of_float32_rounds_no_logit_to_16_bits(tied: bool, packing: str) -> None:
    """With the field, hidden states are float32, whatever the type of the head; without it they are not."""
    values = mx.zeros(32).at[mx.array([0, 1])].add(mx.array([1.0, 1 / 512])).astype(mx.bfloat16)
    for dtype, wanted in (("float32", 1 + 1 / 512), ("", 1.0)):
        model = module_of(head_dtype=dtype, tie_word_embeddings=tied)
        model.model.embed_tokens.weight = mx.ones((64, 32))
        if not tied:
            model.lm_head.weight = mx.ones((64, 32))
        model.set_dtype(mx.bfloat16)
        if packing:
            head = "model.embed_tokens" if tied else "lm_head"
            quantize(model, 32, 8, mode=packing, class_predicate=lambda path, _: path == head)  # noqa: B023
        model["model"] = Fixed(model.model, values)
        logits = model(mx.zeros((1, 3), mx.int32))
        assert logits.dtype == (mx.float32 if dtype else mx.bfloat16)
        assert mx.allclose(logits.astype(mx.float32), mx.array(wanted), rtol=0, atol=1e-6)


class Fixed:
    """A decoder whose hidden states are these [D]."""

    def __init__(self, decoder: Any, hidden: mx.array) -> None:
        self.embed_tokens, self._hidden = decoder.embed_tokens, hidden

    def __call__(self, inputs: mx.array, _: object) -> mx.array:
        return mx.broadcast_to(self._hidden, (*inputs.shape, self._hidden.size))


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_what_multiplies_float32_is_converted_once(dtype: str, tmp_path: Path) -> None:
    """A store has it in 16 bits; loading converts it, and `--dtype bfloat16` leaves it in float32."""
    weights = {name: each.astype(mx.bfloat16) for name, each in together(weights_of(NAME)).items()}
    directory = write_directory(tmp_path / "d", {**KOLIBRI[NAME], "architectures": ["Kolibri1ForCausalLM"]}, weights)
    write_store(tmp_path, "m", directory)
    parameters = parameters_of(load(open_model("m", tmp_path), dtype).module)
    wide = {name for name in parameters if name.endswith(("mlp.gate.weight", "mlp.expert_bias", "lm_head.weight"))}
    assert len(wide) == 2 * 4 + 1
    assert {name for name, array in parameters.items() if array.dtype == mx.float32} == wide


def test_an_impossible_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match='unsupported hidden_act: "relu"'):
        stored(tmp_path, {**KOLIBRI[NAME], "hidden_act": "relu"}, published(weights_of(NAME)))
