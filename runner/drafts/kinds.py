"""The kinds of models that draft and come in packages of their own. Each kind has functions that recognise, open, check
and load a model. Import this module only if there is such a model, since it imports the modules of all kinds."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mlx.nn.layers.base import Module

from runner.drafts.assistant import (
    assemble_assistant,
    check_assistant,
    is_assistant,
    load_assistant,
    open_assistant,
)
from runner.drafts.dflash.dflash_config import ARCHITECTURES, open_dflash
from runner.drafts.dflash.fitting import assemble_dflash, check_dflash, load_dflash
from runner.drafts.drafting import DraftModel
from runner.drafts.own_model import load_own_model, plan_own_model
from runner.errors import ModelError
from runner.model.architectures import Config, architecture_of
from runner.model.module_config import read_config
from runner.model.opened import OpenedModel, find_checkpoint, open_checkpoint
from runner.model.sources.checkpoint import ModelCheckpoint
from runner.model.sources.ollama_store import open_stored_draft
from runner.model.weights.dtype import DtypePlan
from runner.model.weights.loading import LoadedModel, plan_part
from runner.model.weights.packed import Arrays
from runner.tokenizer import Tokenizer, open_tokenizer

_FILE = "tokenizer.json"
_FOREIGN = ("dflash_config", "draft_vocab_size", "markov_rank", "speculators_model_type")
"""Fields that only models have which draft from hidden states of their target."""
_MOST_MORE = 512  # the most tokens by which the vocabularies of two models of one family may differ in length


def check_vocabulary(draft: OpenedModel, target: OpenedModel, tokenizer: Tokenizer) -> None:
    """Raises ModelError unless the draft model has the vocabulary of the target. `tokenizer` is the target's.

    One vocabulary may have a few more tokens at its end. The check lasts some tenths of a second, but no time if the
    models' tokenizer files are the same."""
    if (same := draft.file(_FILE)) is not None and same == target.file(_FILE):
        return
    theirs = open_tokenizer(draft.file, merge_eos=not draft.checkpoint.from_store)
    if abs(theirs.vocab_size - tokenizer.vocab_size) > _MOST_MORE:
        raise ModelError(
            f"its vocabulary differs from the model's: {theirs.vocab_size} tokens instead of {tokenizer.vocab_size}"
        )
    for token in range(min(theirs.vocab_size, tokenizer.vocab_size)):
        if theirs.token_bytes(token) != tokenizer.token_bytes(token):
            raise ModelError(
                f"its vocabulary differs from the model's: token {token} is {theirs.token_text(token)!r} instead of"
                f" {tokenizer.token_text(token)!r}"
            )


def _check_assistant(draft: OpenedModel, target: OpenedModel, loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    check_assistant(draft, target, loaded)
    if draft.file(_FILE) is not None:
        check_vocabulary(draft, target, tokenizer)


def _plan_of(
    assemble: Callable[[OpenedModel, Mapping[str, Arrays]], Module],
) -> Callable[..., tuple[Module, DtypePlan]]:
    return lambda draft, dtype, budget_bytes: plan_part(draft, partial(assemble, draft), dtype, budget_bytes)


class DraftKind(NamedTuple):
    """The functions for one kind of model that drafts."""

    recognise: Callable[[str, Config], bool]
    """`recognise(architecture, config)` returns True if such a model is of this kind. `config` is `config.json`."""
    open: Callable[[ModelCheckpoint], OpenedModel]
    """Interprets the headers of a model. Raises ModelError if they are invalid."""
    check: Callable[[OpenedModel, OpenedModel, LoadedModel, Tokenizer], None]
    """`check(draft, target, loaded, tokenizer)` raises ModelError unless the draft model can draft for the target.
    `loaded` is the target, loaded or made of placeholders, and `tokenizer` is the target's."""
    plan: Callable[..., tuple[Module, DtypePlan]]
    """`plan(draft, dtype, budget_bytes)` builds the model of placeholders. Raises ModelError if it cannot draft."""
    load: Callable[..., DraftModel]
    """`load(draft, loaded, dtype, budget_bytes)` loads the draft model for the target `loaded`. `check` must have
    accepted both. Raises the errors of loading and of the first forward."""


_OWN_MODEL = DraftKind(
    lambda *_: True,
    open_checkpoint,
    lambda draft, target, _, tokenizer: check_vocabulary(draft, target, tokenizer),
    plan_own_model,
    load_own_model,
)
KINDS = (
    DraftKind(
        lambda architecture, _: architecture in ARCHITECTURES,
        open_dflash,
        lambda draft, _, loaded, __: check_dflash(draft, loaded),
        _plan_of(assemble_dflash),
        load_dflash,
    ),
    DraftKind(is_assistant, open_assistant, _check_assistant, _plan_of(assemble_assistant), load_assistant),
    _OWN_MODEL,
)
"""A model is of the first kind that recognises it. The last kind recognises all models."""


class FoundDraft(NamedTuple):
    """An opened model that should draft, and its kind. Only its headers have been read."""

    kind: DraftKind
    model: OpenedModel

    def check(self, target: OpenedModel, loaded: LoadedModel, tokenizer: Tokenizer) -> None:
        """Raises ModelError unless the model can draft for the target. The arguments are those of `DraftKind.check`."""
        if loaded.undraftable:
            raise ModelError(f"answers of {target.name} cannot be drafted: {loaded.undraftable}")
        self.kind.check(self.model, target, loaded, tokenizer)


def open_draft(model: str, models_dir: Path) -> FoundDraft:
    """Opens `model`, an Ollama name or the path of a directory. Raises ModelError if the model cannot be opened, or if
    it drafts in an unknown way."""
    return _recognised(find_checkpoint(model, models_dir))


def open_own_draft(target: OpenedModel, models_dir: Path) -> FoundDraft:
    """Opens the draft model that lies beside `target` in the store. Raises the errors of `open_draft`."""
    return _recognised(open_stored_draft(target.checkpoint, models_dir))


def _recognised(checkpoint: ModelCheckpoint) -> FoundDraft:
    config = read_config(checkpoint)
    architecture = architecture_of(config, from_store=checkpoint.from_store)
    kind = next(kind for kind in KINDS if kind.recognise(architecture, config))
    if kind is _OWN_MODEL and any(field in config for field in _FOREIGN):
        raise ModelError(f"drafts of the kind {architecture} are not supported; docs/drafts.md lists those that are")
    return FoundDraft(kind, kind.open(checkpoint))
