"""A draft computes what mlx-vlm makes of the same weights, however it is stored."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from runner.drafts.dflash.drafter import BlockContext, BlockDraft
from runner.drafts.dflash.fitting import block_target, load_dflash
from runner.drafts.hidden_states import padded
from runner.drafts.kinds import open_draft, open_own_draft
from runner.model import open_model
from runner.model.weights.loading import LoadedModel, load
from scripts.tools.models.checkpoints import write_checkpoint
from scripts.tools.models.dflash import (
    DFLASH2,
    DRAFT,
    DSPARK,
    GLIMMER,
    LAGUNA,
    dflash_config,
    dflash_weights,
    write_dflash,
)
from scripts.tools.models.layouts import plan
from scripts.tools.models.store import add_draft, source_tensors, write_store
from scripts.tools.models.tensors import Quantization, rounded
from tests.model.drafts.answers import greedy
from tests.model.drafts.dflash.cases import ANCHOR, CASES, CHAINED, RECORDED, steps, tables
from tests.model.drafts.dflash.conftest import Load


def context_of(draft: BlockDraft, *starts: int) -> BlockContext:
    return BlockContext(draft.make_layers(len(starts)), starts)


def stand(context: BlockContext, *counts: int) -> None:
    for layer in context.layers:
        layer.stand(counts)


def blocks(draft: BlockDraft, part: int = 99) -> mx.array:
    """The states of all blocks of the cases, one below the other; `part` features are read at a time."""
    context, seen, found = context_of(draft, 0), 0, []
    for step in steps():
        for begin in range(0, step.features.shape[1], part):
            draft.module.remember(step.features[:, begin : begin + part], context)
        seen += step.features.shape[1]
        found.append(draft.module(step.embedded, context)[0])
        stand(context, seen)
    return mx.concatenate(found)


@pytest.mark.parametrize("part", [99, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_draft_computes_what_mlx_vlm_does(name: str, part: int, loaded_draft: Load, tmp_path: Path) -> None:
    architecture, changes = CASES[name]
    draft = loaded_draft(write_dflash(tmp_path, architecture, changes))
    wanted = cast("dict[str, mx.array]", mx.load(str(RECORDED)))[name]
    found = blocks(draft, part)
    assert found.shape == wanted.shape
    assert mx.abs(found - wanted).max() < 1e-5 * mx.abs(wanted).max()


def told_target(*, scaled: bool) -> LoadedModel:
    """A target with the recorded tables."""
    target, inner = Module(), Module()
    embeddings, output = tables()
    inner.embed_tokens, inner.layers = Embedding(*embeddings.shape), [Linear(1, 1), Linear(1, 1)]
    target.model, target.lm_head = inner, Linear(64, len(output), bias=False)
    inner.embed_tokens.weight, target.lm_head.weight = embeddings, output
    target.args = SimpleNamespace(output_multiplier=9.0, final_logit_softcapping=0.1) if scaled else None
    return LoadedModel(target)


@pytest.mark.parametrize("name", CHAINED)
def test_drafts_follow_each_other_as_in_mlx_vlm(name: str, loaded_draft: Load, tmp_path: Path) -> None:
    """DFlash 2 scales logits as its config says, whatever the target does."""
    architecture, changes = CASES[name]
    config, module, _ = loaded_draft(write_dflash(tmp_path, architecture, changes))
    draft = BlockDraft(config, module, block_target(config, told_target(scaled=architecture == DFLASH2)))
    wanted = cast("dict[str, mx.array]", mx.load(str(RECORDED)))[f"{name}: drafts"]
    context, seen, found = context_of(draft, 0), 0, list[mx.array]()
    for step in steps():
        module.remember(step.features, context)
        seen += step.features.shape[1]
        found += draft.draft([ANCHOR], step.embedded.shape[1] - 1, context, greedy)
        stand(context, seen)
    assert mx.concatenate(found).tolist() == wanted.tolist()


def test_a_context_may_begin_anywhere(loaded_draft: Load, tmp_path: Path) -> None:
    """Attention is relative: the same tokens further back give the same block, in one forward, too."""
    draft = loaded_draft(write_dflash(tmp_path, LAGUNA))
    (first, *_) = steps()
    context = context_of(draft, 0, 1000)
    draft.module.remember(mx.concatenate([first.features] * 2), context)
    near, far = draft.module(mx.concatenate([first.embedded] * 2), context)
    assert mx.abs(near - far).max() < 1e-3
    assert not mx.array_equal(near, far)


@pytest.mark.parametrize("name", CASES)
def test_each_text_of_a_forward_is_seen_by_its_own_block(name: str, loaded_draft: Load, tmp_path: Path) -> None:
    """Texts of other lengths, which begin elsewhere."""
    architecture, changes = CASES[name]
    draft = loaded_draft(write_dflash(tmp_path, architecture, changes))
    first, second, *_ = steps()
    rows, starts = [first.features[:, :3], second.features[:, :1], first.features], (5, 0, 9)
    counts = [each.shape[1] for each in rows]
    context = context_of(draft, *starts)
    draft.module.remember(mx.concatenate([padded(each, max(counts)) for each in rows]), context)
    stand(context, *counts)
    embedded = mx.concatenate([first.embedded] * 3)
    found = draft.module(embedded, context)
    for row, (features, start) in enumerate(zip(rows, starts, strict=True)):
        alone = context_of(draft, start)
        draft.module.remember(features, alone)
        assert mx.allclose(found[row], draft.module(first.embedded, alone)[0], atol=1e-5)


def test_what_is_forgotten_is_not_seen(loaded_draft: Load, tmp_path: Path) -> None:
    draft = loaded_draft(write_dflash(tmp_path, DRAFT))
    first, second, third, _ = steps()
    context, short = context_of(draft, 0), context_of(draft, 5)
    for step in (first, second, third):
        draft.module.remember(step.features, context)
    stand(context, 9)
    for layer in context.layers:
        layer.keep_last([4])
    context = context._replace(starts=[5])
    draft.module.remember(second.features, short)
    draft.module.remember(third.features[:, :2], short)
    assert [layer.lengths for layer in context.layers] == [layer.lengths for layer in short.layers] == [[4]] * 2
    found, wanted = (draft.module(third.embedded, each) for each in (context, short))
    assert mx.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "quantization"),
    [(DRAFT, "int8"), (LAGUNA, "nvfp4"), (GLIMMER, "int8"), (DFLASH2, "int8"), (DSPARK, "int8")],
)
def test_packed_layers_of_a_store_compute_the_same(
    architecture: str, quantization: Quantization, tmp_path: Path
) -> None:
    """Laguna's projections are packed as one, and come apart."""
    store = write_store(tmp_path / "models", "tiny", write_checkpoint(tmp_path / "source", "llama"))
    directory, config = write_dflash(tmp_path / "draft", architecture), dflash_config(architecture)
    packings = plan(source_tensors(directory), config, quantization).packings
    add_draft(store, directory, quantization)
    model = open_model("tiny", store.models_dir)
    opened = open_own_draft(model, store.models_dir).model
    assert sum(tensor.scale is not None for tensor in opened.tensors.values()) > 10
    found = load_dflash(opened, load(model)).dflash
    weights = {
        name: rounded(array, packings[name]) if name in packings else array
        for name, array in dflash_weights(config).items()
    }
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    wanted = load_dflash(open_draft(str(directory), directory).model, load(model)).dflash
    assert mx.abs(blocks(found) - blocks(wanted)).max() < 1e-4 * mx.abs(blocks(wanted)).max()
