"""Drafts that cannot be used: each is refused with its reason, and the model stays as it is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from runner.drafts.dflash.fitting import check_dflash, load_dflash
from runner.drafts.kinds import open_draft
from runner.errors import ModelError
from runner.model import open_model
from runner.model.weights.loading import LoadedModel, load
from scripts.tools.models.checkpoints import write_checkpoint
from scripts.tools.models.dflash import DFLASH2, DRAFT, DSPARK, LAGUNA, dflash_config, dflash_weights
from scripts.tools.models.sources import write_source
from tests.model.loading.conftest import run

Weights = dict[str, mx.array]
Change = Callable[[Weights], object]


def without(*endings: str) -> Change:
    def change(weights: Weights) -> None:
        for name in [name for name in weights if name.endswith(endings)]:
            del weights[name]

    return change


def nothing(_: Weights) -> None: ...


def put_tensor(name: str, *shape: int) -> Change:
    return lambda weights: weights.update({name: mx.zeros(shape)})


TENSORS: dict[str, tuple[str, Change, str]] = {
    "no projection of features": (DRAFT, without("fc.weight"), "lacks 1 tensors: fc.weight"),
    "half of the fused rows": (LAGUNA, put_tensor("layers.0.self_attn.qkv_proj.weight", 64, 64), "self_attn.k_proj"),
    "a norm for one of two layers": (LAGUNA, without("norms.1.weight"), "lacks 1 tensors: aux_hidden_norms.1.weight"),
    "another width": (DRAFT, put_tensor("fc.weight", 64, 64), "want shape [64, 128], found [64, 64]"),
    "a table of its own": (DRAFT, put_tensor("embed_tokens.weight", 274, 64), "does not know: embed_tokens.weight"),
    "two of one": (DRAFT, put_tensor("model.norm.weight", 64), "two of its tensors are the same parameter: norm"),
    "a codebook twice": (
        DFLASH2, put_tensor("candidate_selector.successor_codebook.weight", 274, 8), "the same parameter: candidate_",
    ),
    "no selector": (
        DFLASH2, without("_codebook"), "lacks 2 tensors: candidate_selector.predecessor_codebook.weight",
    ),
    "sums of three rows": (DFLASH2, put_tensor("layers.0.mlp_conv.base_kernel", 2, 3, 64), "want shape [2, 2, 64]"),
    "a head of another rank": (DSPARK, put_tensor("markov_head.markov_w1.weight", 274, 9), "want shape [274, 8]"),
    "half of a head": (DRAFT, put_tensor("markov_head.markov_w1.weight", 274, 8), "does not know: markov_head"),
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, object], str]] = {
    "another width of hidden states": (DRAFT, {"hidden_size": 32}, "made for a model of 32 numbers a token, and this"),
    "another vocabulary": (DRAFT, {"vocab_size": 300}, "made for a model of 300 tokens in the vocabulary, and"),
    "another depth": (DRAFT, {"num_target_layers": 36}, "made for a model of 36 layers, and this one has 2"),
    "layers beyond the last": (DRAFT, {"target_layer_ids": [0, 7]}, "reads layer 7, but the model has 2 layers"),
    "a mask beyond the vocabulary": (DRAFT, {"mask_token_id": 5000}, "its mask token is 5000, but the model has"),
    "no layers of the target": (DRAFT, {"target_layer_ids": []}, "invalid target_layer_ids: []"),
    "layers in disorder": (DRAFT, {"target_layer_ids": [1, 0]}, "target_layer_ids must ascend"),
    "no mask": (DRAFT, {"mask_token_id": None}, "mask_token_id: missing"),
    "a block of nothing": (DRAFT, {"block_size": 1}, "invalid block_size: 1"),
    "kinds of other layers": (DRAFT, {"layer_types": ["mamba", "mamba"]}, "invalid layer_types of 2 layers"),
    "no window": (DRAFT, {"layer_types": ["sliding_attention"] * 2}, "sliding_window: want a positive integer, found"),
    "heads that do not divide": (DRAFT, {"num_key_value_heads": 3}, "must be divisible by 3"),
    "most of a hundred layers": (DRAFT, {"num_hidden_layers": 60}, "most of its 60 layers are missing"),
    "settings that are none": (DRAFT, {"dflash_config": []}, "dflash_config: want an object, found list"),
    "groups that do not divide": (DFLASH2, {"conv_group_size": 48}, "hidden_size (64) must be divisible by 48"),
    "no convolution": (DFLASH2, {"conv_kernel_size": None}, "conv_kernel_size: want a positive integer, found None"),
    "more candidates than tokens": (DFLASH2, {"selector_top_k": 275}, "selector_top_k: want a positive integer"),
    "an activation of another kind": (DRAFT, {"hidden_act": "gelu"}, "hidden_act: want 'silu', found 'gelu'"),
    "a limit of nothing": (DFLASH2, {"final_logit_softcapping": -1}, "final_logit_softcapping: want a positive"),
    "a block without drafts": (DSPARK, {"block_size": 1, "dspark_bonus_anchor": True}, "invalid block_size: 1"),
    "a head with gates": (DSPARK, {"markov_head_type": "gated"}, "markov_head_type: want 'vanilla', found 'gated'"),
    "no rank": (DSPARK, {"markov_rank": 0}, "does not know: markov_head.markov_w1.weight"),
    "some of the tokens": (DSPARK, {"draft_vocab_size": 100}, "it drafts only 100 of 274 tokens, which is not"),
    "what vLLM trains": (DSPARK, {"transformer_layer_config": {}}, "form of vLLM's speculators are not supported"),
}  # fmt: skip


def write(directory: Path, architecture: str, changes: dict[str, object], change: Change) -> Path:
    config = dflash_config(architecture)
    nested = cast("dict[str, object]", config["dflash_config"])
    weights = dflash_weights(config)
    for key, value in changes.items():
        place = nested if key in nested else config
        place[key] = value
    change(weights)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    return directory


def refused(directory: Path, target: LoadedModel) -> str:
    """Returns why a draft is refused: the same by its headers and by loading it."""
    with pytest.raises(ModelError) as loading:
        load_dflash(open_draft(str(directory), directory).model, target)
    with pytest.raises(ModelError) as by_headers:
        _rehearse(directory, target)
    assert str(loading.value) == str(by_headers.value)
    return str(loading.value)


def _rehearse(directory: Path, target: LoadedModel) -> None:
    kind, opened = open_draft(str(directory), directory)
    check_dflash(opened, target)
    kind.plan(opened, "keep", None)


@pytest.mark.parametrize("fault", TENSORS)
def test_tensors_that_do_not_fit_are_named(fault: str, target: LoadedModel, tmp_path: Path) -> None:
    architecture, change, why = TENSORS[fault]
    before = run(target)
    assert why in refused(write(tmp_path / "draft", architecture, {}, change), target)
    assert mx.array_equal(run(target), before)


@pytest.mark.parametrize("fault", CONFIGS)
def test_a_draft_for_another_model_is_refused(fault: str, target: LoadedModel, tmp_path: Path) -> None:
    architecture, changes, why = CONFIGS[fault]
    before = run(target)
    assert why in refused(write(tmp_path / "draft", architecture, changes, nothing), target)
    assert mx.array_equal(run(target), before)


def test_dspark_leaves_what_its_target_has_and_what_nobody_asks_for(target: LoadedModel, tmp_path: Path) -> None:
    spare = {"embed_tokens.weight": (274, 64), "model.lm_head.weight": (274, 64), "confidence_head.proj.bias": (1,)}

    def add(weights: Weights) -> None:
        weights |= {name: mx.zeros(shape) for name, shape in spare.items()}

    plain, more = (write(tmp_path / str(place), DSPARK, {}, each) for place, each in enumerate((nothing, add)))
    models = [open_draft(str(directory), directory).model for directory in (plain, more)]
    assert models[0].total_bytes == models[1].total_bytes
    load_dflash(models[1], target)


OTHERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "gpt2": (lambda root: write_source(root, "gpt2"), "the model lacks a part that the draft shares (KeyError: "),
    "deepseek_v41": (lambda root: write_checkpoint(root, "deepseek_v41"), "and those of the model return "),
    "falcon_h1": (
        lambda root: write_checkpoint(root, "falcon_h1"),
        "no layer of the model counts the tokens that it has seen",
    ),
}
"""Models that call their layers otherwise, or hand other things from layer to layer than hidden states."""


@pytest.mark.parametrize("kind", OTHERS)
def test_a_model_without_the_parts_is_refused(kind: str, tmp_path: Path) -> None:
    write_target, why = OTHERS[kind]
    directory = write_target(tmp_path / "target")
    target = load(open_model(str(directory), directory))
    draft = write(tmp_path / "draft", DRAFT, {"vocab_size": None}, nothing)
    with pytest.raises(ModelError) as error:
        load_dflash(open_draft(str(draft), draft).model, target)
    assert why in str(error.value)
    run(target)
