"""A target, and drafts for it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runner.drafts.dflash.drafter import BlockDraft
from runner.drafts.dflash.fitting import load_dflash
from runner.drafts.kinds import open_draft
from runner.model import open_model
from runner.model.weights.loading import LoadedModel, load
from scripts.tools.models.checkpoints import write_checkpoint

Load = Callable[[Path], BlockDraft]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A random llama of two layers."""
    directory = write_checkpoint(tmp_path_factory.mktemp("target") / "llama", "llama")
    return load(open_model(str(directory), directory))


@pytest.fixture
def loaded_draft(target: LoadedModel) -> Load:
    """Loads the draft in a directory."""
    return lambda directory: load_dflash(open_draft(str(directory), directory).model, target).dflash
