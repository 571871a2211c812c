"""A draft model that `--draft` names, or that lies beside the model in the store: one by itself, an assistant, or a
DFlash draft. Imported only where there is one.
"""

from pathlib import Path
from typing import Generic, TypeVar, cast

import mlx.core as mx

from runner.cache.session import Session
from runner.drafts.assistant.drafter import AssistantDrafter
from runner.drafts.assistant.load import Assistant, load_assistant
from runner.drafts.assistant.load import check_target as check_assistant
from runner.drafts.assistant.opening import is_assistant, is_named_assistant, open_assistant
from runner.drafts.dflash.config import ARCHITECTURES, is_dflash, open_dflash
from runner.drafts.dflash.drafter import MOST_ROWS, BlockDraft, BlockDrafter
from runner.drafts.dflash.load import check_target as check_dflash
from runner.drafts.dflash.load import load_draft
from runner.drafts.heads.head import MOST_SLOTS, Head, HeadDrafter
from runner.drafts.heads.target import MOST_ROWS as MOST_HEAD_ROWS
from runner.drafts.own_model import OwnDraftModel
from runner.drafts.pacing import Forward
from runner.errors import ModelError
from runner.model.config import read_config
from runner.model.families import architecture_of
from runner.model.opened import OpenedModel, find_checkpoint, open_checkpoint
from runner.model.sources.checkpoint import Checkpoint
from runner.model.sources.store import open_stored_draft
from runner.model.weights.load import LoadedModel, load
from runner.sampling.sampler import Sampler
from runner.settings import DRAFT_AUTO
from runner.tokenizer import Tokenizer, open_tokenizer

# --- Whether two models mean the same by each token.

_FILE = "tokenizer.json"
_MOST_MORE = 512  # tokens: models of one family add some to a common vocabulary


def check_vocabulary(draft: OpenedModel, target: OpenedModel, tokenizer: Tokenizer) -> None:
    """Raises ModelError unless the draft model has the vocabulary of the target, whose tokenizer is given.

    One of them may have some tokens more at the end. Takes some tenths of a second, unless the files are the same.
    """
    if (same := draft.file(_FILE)) is not None and same == target.file(_FILE):
        return
    theirs = open_tokenizer(draft.file, merge_eos=not draft.checkpoint.from_store)
    if abs(theirs.vocab_size - tokenizer.vocab_size) > _MOST_MORE:
        raise ModelError(
            f"it has another vocabulary than the model: {theirs.vocab_size} tokens instead of {tokenizer.vocab_size}"
        )
    for token in range(min(theirs.vocab_size, tokenizer.vocab_size)):
        if theirs.token_bytes(token) != tokenizer.token_bytes(token):
            raise ModelError(
                f"it has another vocabulary than the model: token {token} is {theirs.token_text(token)!r} instead of"
                f" {tokenizer.token_text(token)!r}"
            )


# --- Opens the model that drafts for another one, by its headers.


def open_draft(model: str, models_dir: Path) -> OpenedModel:
    """Opens `model`, an Ollama name or the path of a directory: a model by itself, an assistant or a DFlash draft.
    Raises ModelError if it cannot be opened, or drafts in another way."""
    return _opened(find_checkpoint(model, models_dir))


def open_own_draft(target: OpenedModel, models_dir: Path) -> OpenedModel:
    """Opens the draft model that lies beside `target` in the store; else as `open_draft`."""
    return _opened(open_stored_draft(target.checkpoint, models_dir))


def _opened(checkpoint: Checkpoint) -> OpenedModel:
    config = read_config(checkpoint)
    architecture = architecture_of(config, from_store=checkpoint.from_store)
    if architecture in ARCHITECTURES:
        return open_dflash(checkpoint)
    if is_named_assistant(architecture, config):
        return open_assistant(checkpoint)
    if "dflash_config" in config:
        raise ModelError(f"{architecture} drafts from what the model has computed, which is not supported yet")
    return open_checkpoint(checkpoint)


# --- A draft model that watches what the answering model computes, in place of reading the text.

Drafter = TypeVar("Drafter", bound="HeadDrafter | AssistantDrafter | BlockDrafter")
MOST_SEEN = 80
"""Tokens of a forward: a step, a round with forced tokens, the rest of a prompt."""


class WatchingModel(Generic[Drafter]):
    """Drafts from what the answering model has computed. Owner: the engine thread."""

    at_once = False

    def __init__(self, name: str, drafter: Drafter, most_bytes: int) -> None:
        self.name = name
        self.drafter = drafter
        self.most_bytes = most_bytes
        """The bytes that everything but the weights may take."""

    def watch(self, forward: Forward) -> Forward:
        """Returns the answering model's `forward`, which shows the drafter what it computes."""
        watched, tap = self.drafter.watch(forward), self.drafter.tap

        def shown(tokens: mx.array, layers: list[object]) -> mx.array:
            tap.turn(self.shows(tokens))
            try:
                return watched(tokens, layers)
            finally:
                tap.turn(False)

        return shown

    def shows(self, tokens: mx.array) -> bool:
        """Returns True if the drafter is to see the forward over `tokens` [B, L]. Long parts of a prompt would compute
        more than the prompt needs."""
        return tokens.shape[1] <= MOST_SEEN

    @property
    def nbytes(self) -> int:
        return self.drafter.nbytes

    def read(self, session: Session, *, briefly: bool) -> bool:  # noqa: ARG002  it has seen what there is
        return False

    def propose(self, session: Session, most: int, sampler: Sampler) -> list[int]:
        return self.drafter.propose(session.layers, session.position, session.recorded, most, sampler.preview())

    def free(self) -> None:
        self.drafter.free()


# --- An assistant of the answering model, as a model that drafts.


class AssistantModel(WatchingModel[AssistantDrafter]):
    """Drafts with an assistant."""

    def __init__(self, name: str, assistant: Assistant) -> None:
        row_bytes = assistant.target.norm["weight"].shape[0] * mx.float32.size
        # The hidden states of a forward, and of the one before it.
        super().__init__(name, AssistantDrafter(assistant), 2 * MOST_SEEN * row_bytes)


# --- A DFlash draft, as a model that drafts.

_PART_TOKENS = 64  # of a text, beside a step of its answer
_GROWTH_TOKENS = 256  # mlx-lm's layers grow by as many at a time


class DFlashModel(WatchingModel[BlockDrafter]):
    """Drafts with a DFlash draft: all tokens in one forward."""

    at_once = True

    def __init__(self, name: str, draft: BlockDraft) -> None:
        drafter = BlockDrafter(draft)
        context, width = draft.make_context(0), len(draft.config.taps) * draft.config.width
        row = mx.zeros((1, 1, width), draft.target.embed(mx.zeros((1, 1), mx.uint32)).dtype)
        draft.read(row, context)
        held = 2 * drafter.context_tokens // _GROWTH_TOKENS + 2
        # Its context, and the features that wait to be read.
        super().__init__(name, drafter, held * context.nbytes + 2 * MOST_ROWS * row.nbytes)

    def shows(self, tokens: mx.array) -> bool:
        """Returns True for a single answer: its tap keeps the last rows of a prompt, however long."""
        return tokens.shape[0] == 1

    def read(self, session: Session, *, briefly: bool) -> bool:
        if not self.drafter.follows(session.layers):
            return False
        if briefly:
            self.drafter.skip(session.position, _PART_TOKENS)
        return self.drafter.read(session.position, session.recorded, _PART_TOKENS)


# --- The head of the answering model itself, as a model that drafts.


class HeadModel(WatchingModel[HeadDrafter]):
    """Drafts with the model's own head."""

    def __init__(self, head: Head) -> None:
        layers, tokens = head.make_layers(), mx.zeros((1, 1), mx.uint32)
        states = head.states(head.target.embed(tokens), tokens, layers)
        mx.eval(states)
        kept = sum(cast("int", layer.nbytes) for layer in layers) * (MOST_SLOTS // _GROWTH_TOKENS)
        # Its layers, and the hidden states that wait to be read.
        super().__init__("the model's own head", HeadDrafter(head), kept + 2 * MOST_HEAD_ROWS * states.nbytes)


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
