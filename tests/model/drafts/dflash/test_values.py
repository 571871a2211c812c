"""A draft computes what mlx-vlm makes of the same weights, however it is stored."""

from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from runner.drafts.dflash.drafter import BlockDraft
from runner.drafts.dflash.load import load_dflash
from runner.drafts.kinds import open_draft, open_own_draft
from runner.model import open_model
from runner.model.weights.load import load
from scripts.tools.models.checkpoints import write_checkpoint
from scripts.tools.models.dflash import DRAFT, GLIMMER, LAGUNA, dflash_config, dflash_weights, write_dflash
from scripts.tools.models.layouts import plan
from scripts.tools.models.store import add_draft, source_tensors, write_store
from scripts.tools.models.tensors import Quantization, rounded
from tests.model.drafts.dflash.cases import CASES, RECORDED, steps
from tests.model.drafts.dflash.conftest import Load


def blocks(draft: BlockDraft, *, beside: bool = True) -> mx.array:
    """The states of all blocks of the cases, one below the other; with features read `beside` a block, or before."""
    context, found = draft.make_context(0), []
    for step in steps():
        if beside:
            found.append(draft.module(step.embedded, step.features, context)[0])
            continue
        draft.read(step.features[:, :2], context)
        if step.features.shape[1] > 2:
            draft.read(step.features[:, 2:], context)
        found.append(draft.module(step.embedded, None, context)[0])
    return mx.concatenate(found)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_draft_computes_what_mlx_vlm_does(name: str, beside: bool, loaded_draft: Load, tmp_path: Path) -> None:
    architecture, changes = CASES[name]
    draft = loaded_draft(write_dflash(tmp_path, architecture, changes))
    wanted = cast("dict[str, mx.array]", mx.load(str(RECORDED)))[name]
    found = blocks(draft, beside=beside)
    assert found.shape == wanted.shape
    assert mx.abs(found - wanted).max() < 1e-5 * mx.abs(wanted).max()


def test_a_context_may_begin_anywhere(loaded_draft: Load, tmp_path: Path) -> None:
    """Attention is relative: the same tokens further back give the same block."""
    draft = loaded_draft(write_dflash(tmp_path, LAGUNA))
    (first, *_) = steps()
    near, far = (draft.module(first.embedded, first.features, draft.make_context(start)) for start in (0, 1000))
    assert mx.abs(near - far).max() < 1e-3
    assert not mx.array_equal(near, far)


def test_what_is_forgotten_is_not_seen(loaded_draft: Load, tmp_path: Path) -> None:
    draft = loaded_draft(write_dflash(tmp_path, DRAFT))
    first, second, third, _ = steps()
    context, short = draft.make_context(0), draft.make_context(5)
    for step in (first, second, third):
        draft.read(step.features, context)
    context.trim(9)
    context.forget(5)
    assert context.nbytes == 4 * 512
    draft.read(second.features, short)
    draft.read(third.features[:, :2], short)
    assert (context.start, context.stop) == (short.start, short.stop) == (5, 9)
    found, wanted = (draft.module(third.embedded, None, each) for each in (context, short))
    assert mx.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(("architecture", "quantization"), [(DRAFT, "int8"), (LAGUNA, "nvfp4"), (GLIMMER, "int8")])
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
