"""A draft model that `--draft` names, or that lies beside the model in the store: one by itself, an assistant, or a
DFlash draft. Imported only where there is one."""

from pathlib import Path

from runner.engine.draft_model.assistant_model import AssistantModel
from runner.engine.draft_model.dflash_model import DFlashModel
from runner.engine.draft_model.head_model import HeadModel
from runner.engine.draft_model.own_model import OwnDraftModel
from runner.engine.draft_model.vocabulary import check_vocabulary
from runner.errors import ModelError
from runner.model import OpenedModel
from runner.model.assistant.load import check_target as check_assistant
from runner.model.assistant.load import load_assistant
from runner.model.assistant.opening import is_assistant
from runner.model.dflash.load import check_target as check_dflash
from runner.model.dflash.load import load_draft
from runner.model.dflash.opening import is_dflash
from runner.model.draft import open_draft, open_own_draft
from runner.model.weights.load import LoadedModel, load
from runner.settings import DRAFT_AUTO
from runner.tokenizer import Tokenizer

AnyModel = OwnDraftModel | AssistantModel | DFlashModel | HeadModel


def open_named(wish: str, models_dir: Path, target: OpenedModel) -> OpenedModel:
    """Opens the draft model by its headers. `wish` is the value of `--draft`. Raises ModelError if it cannot be
    used."""
    return open_own_draft(target, models_dir) if wish == DRAFT_AUTO else open_draft(wish, models_dir)


def check_match(draft: OpenedModel, target: OpenedModel, loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    """Raises ModelError unless the draft model may draft for the target, which is `loaded`, or rehearsed. An assistant
    needs no tokenizer, and a DFlash draft has none."""
    if loaded.undraftable:
        raise ModelError(f"answers of {target.name} cannot be drafted: {loaded.undraftable}")
    if is_dflash(draft):
        check_dflash(draft, loaded.module)
        return
    if is_assistant(draft):
        check_assistant(draft, target, loaded.module)
        if draft.file("tokenizer.json") is None:
            return
    check_vocabulary(draft, target, tokenizer)


def load_named(found: OpenedModel, loaded: LoadedModel, dtype: str, budget_bytes: int, *, slow_blas: bool) -> AnyModel:
    """Loads the draft model, which matches the target. Raises what loading and its first forward raise."""
    if is_dflash(found):
        return DFlashModel(found.name, load_draft(found, loaded, dtype, budget_bytes, slow_blas=slow_blas))
    if is_assistant(found):
        return AssistantModel(found.name, load_assistant(found, loaded, dtype, budget_bytes, slow_blas=slow_blas))
    weights = load(found, dtype, budget_bytes, slow_blas=slow_blas)
    return OwnDraftModel(found.name, weights.make_layers, weights.logits, found.vocab_size)
