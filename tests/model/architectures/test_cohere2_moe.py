"""The module of ours for Cohere2-MoE: the numbers of mlx-vlm, the layers of transformers, the words of Ollama.

As an architecture among the others it is asked everything in `test_architectures.py`, and in `test_sources.py` as a
published model in every layout of a store.
"""

import importlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest

import runner.process.lean_mlx_lm  # noqa: F401
from runner.errors import ModelError
from scripts.tools.models.sources_steps import Weights
from tests.model.architectures.record import CASES, TOKENS, apart, check_logits, stored, weights_of

SIZES: Mapping[str, object] = dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads"), 4)


def together(weights: Weights) -> Weights:
    """As Ollama stacks them, with the other name of the shared ones."""
    names = (("switch_mlp", "experts"), (".shared_experts.", ".shared_expert."))
    return {name.replace(*names[0]).replace(*names[1]): array for name, array in weights.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", [apart, together])
def test_logits_are_those_of_mlx_vlm(name: str, layout: Callable[[Weights], Weights], tmp_path: Path) -> None:
    check_logits(stored(tmp_path, CASES[name], layout(weights_of(name))), name)


def test_a_head_of_its_own_gives_the_logits(tmp_path: Path) -> None:
    name = "softmax"
    weights = weights_of(name)
    head = mx.random.normal(weights["model.embed_tokens.weight"].shape, key=mx.random.key(1))
    config = {**CASES[name], "tie_word_embeddings": False}
    untied = stored(tmp_path / "untied", config, apart({**weights, "lm_head.weight": head}))
    tied = stored(tmp_path / "tied", CASES[name], apart({**weights, "lm_head.weight": head}))
    tokens = mx.array([TOKENS])
    hidden = cast("Any", tied.module).model(tokens)
    assert mx.array_equal(untied.logits(tokens, untied.make_layers()), hidden @ head.T * 0.25)
    assert not mx.allclose(untied.logits(tokens, untied.make_layers()), tied.logits(tokens, tied.make_layers()))


def arguments(**fields: object) -> Any:
    module = importlib.import_module("mlx_lm.models.cohere2_moe")
    return module.ModelArgs("cohere2_moe", num_hidden_layers=7, **SIZES, **fields)


@pytest.mark.parametrize(
    ("fields", "full", "dense"),
    [
        ({}, {3}, set()),
        ({"sliding_window_pattern": 2}, {1, 3, 5}, set()),
        ({"first_k_dense_replace": 2}, {0, 1, 5}, {0, 1}),
        ({"first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 2}, {1, 6}, {0, 1, 2}),
        ({"mlp_layer_types": ["sparse"] * 6 + ["dense"]}, {3}, {6}),
        ({"layer_types": ["full_attention"] + ["sliding_attention"] * 6}, {0}, set()),
    ],
)
def test_which_layers_see_everything_and_which_are_dense(
    fields: Mapping[str, object], full: set[int], dense: set[int]
) -> None:
    args = arguments(**fields)
    assert {layer for layer, slides in enumerate(args.windows) if not slides} == full
    assert {layer for layer, kind in enumerate(args.mlp_layer_types) if kind == "dense"} == dense


@pytest.mark.parametrize(
    ("fields", "turning"),
    [
        ({"first_k_dense_replace": 2}, {0, 1, 2, 3, 4, 6}),
        ({"first_k_dense_replace": 2, "prefix_dense_sliding_window_pattern": 2}, {0, 2, 3, 4, 6}),
    ],
)
def test_which_layers_have_positions(fields: Mapping[str, object], turning: set[int]) -> None:
    module = importlib.import_module("mlx_lm.models.cohere2_moe")
    model = module.Model(arguments(vocab_size=8, **fields))
    assert {layer for layer, block in enumerate(model.layers) if block.self_attn.turns} == turning


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"expert_selection_fn": "relu"}, 'unsupported expert_selection_fn: "relu"'),
        ({"shared_expert_combination_strategy": "max"}, 'unsupported shared_expert_combination_strategy: "max"'),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok (7) exceeds num_experts (6)"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, want 4"),
        ({"layer_types": ["chunked_attention"] * 4}, "unsupported layer_types: 'chunked_attention'"),
    ],
)
def test_an_impossible_config_is_refused(fields: Mapping[str, object], text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=re.escape(text)):
        stored(tmp_path, {**CASES["softmax"], **fields}, apart(weights_of("softmax")))


def test_a_model_of_mlx_lms_own_comes_first() -> None:
    """Ours stand after it, for those that it does not have."""
    import mlx_lm.models

    ours = Path(importlib.import_module("mlx_lm.models.cohere2_moe").__file__ or "").parent
    first, *others = map(Path, mlx_lm.models.__path__)
    assert first.parent.name == "mlx_lm"
    assert ours in others
