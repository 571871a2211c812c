"""The wing that drafts: finds and loads the model that drafts, and adds drafts to an engine.

The model that drafts is the model that `--draft` names. With `auto` it is the draft model that lies beside the target
in the store, or else the target's own head, if there is one."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from runner import cpu
from runner.drafts.costs import CPU_COSTS, GPU_COSTS
from runner.drafts.draft_policy import DraftPolicy
from runner.drafts.drafting import Drafting, DraftModel
from runner.drafts.rounds import BatchRounds
from runner.engine.parts import Examined, Facts, Parts, Wing
from runner.errors import DraftError, ModelError
from runner.logs import Log, exception_line
from runner.model import OpenedModel
from runner.model.weights.loading import LoadedModel
from runner.settings import DRAFT_AUTO, DRAFT_OFF, CheckSettings, Settings
from runner.sizes import sized
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runner.drafts.kinds import FoundDraft

log = Log(__name__)


def find_draft(wish: str, models_dir: Path, target: OpenedModel) -> "FoundDraft | None":
    """Opens the model that should draft, by its headers. Returns None if there is none. `wish` is the value of
    `--draft`. Raises ModelError if the model cannot be used."""
    if wish == DRAFT_OFF or (wish == DRAFT_AUTO and not target.checkpoint.draft_bytes):
        return None
    from runner.drafts.kinds import open_draft, open_own_draft  # most models have no draft model

    return open_own_draft(target, models_dir) if wish == DRAFT_AUTO else open_draft(wish, models_dir)


class DraftModelOpener:
    """Opens the model that drafts before the target is loaded, and loads it afterwards. An unusable model is an error
    if `--draft` names it; any other unusable model is left out. Owner: the engine thread."""

    def __init__(self, settings: Settings, target: OpenedModel) -> None:
        """Reads only headers. Raises DraftError if `--draft` names an unusable model."""
        self._settings = settings
        self._target = target
        self._found: FoundDraft | None = None
        try:
            self._found = find_draft(settings.draft, settings.models_dir, target)
        except ModelError as error:
            self._give_up(error)

    def reserved_bytes(self, budget_bytes: int) -> int:
        """Returns the bytes of the budget that the target should leave for the draft model; 0 if the two models
        together exceed the budget anyway."""
        needed = 0 if self._found is None else self._found.model.total_bytes
        return needed if needed + self._target.total_bytes <= budget_bytes else 0

    def load(self, loaded: LoadedModel, tokenizer: Tokenizer, budget_bytes: int) -> DraftModel | None:
        """Loads the draft model or, with `--draft auto` and no usable draft model, the target's head. Returns None if
        there is neither. `loaded` is the target, `tokenizer` is the target's tokenizer, and `budget_bytes` limits both
        models together. Raises the errors of the constructor."""
        dtype = self._settings.dtype
        if self._found is not None:
            kind, draft = self._found
            try:
                self._found.check(self._target, loaded, tokenizer)
                rest = max(0, budget_bytes - mx.get_active_memory())
                model = kind.load(draft, loaded, dtype, rest)
            except Exception as error:  # MLX may raise any exception at the first forward
                self._give_up(error)
            else:
                nbytes = draft.total_bytes
                log.info("draft model loaded", model=draft.name, architecture=draft.architecture, bytes=nbytes)
                return model
        names = (*self._target.checkpoint.tensors, *self._target.checkpoint.unreadable)
        if self._settings.draft != DRAFT_AUTO or loaded.undraftable or not any("mtp." in name for name in names):
            return None
        from runner.drafts.heads.head_plan import load_head  # most models have no head

        rest = max(0, budget_bytes - mx.get_active_memory())
        return load_head(self._target, loaded, dtype, rest)

    def _give_up(self, error: Exception) -> None:
        why = str(error) if isinstance(error, ModelError) else exception_line(error)
        if self._settings.draft != DRAFT_AUTO:
            raise DraftError(f"--draft {self._settings.draft}: {why}") from error
        log.info("the draft model beside this one is not used", why=why)


class DraftFacts(Facts, frozen=True, kw_only=True):
    """The line about drafts of `mlx-runner check`, from headers alone. `model` and the three fields after it describe
    the draft model. They are None if there is none, or if it cannot draft."""

    on: bool
    """False with `--draft off`."""
    why_not: str | None = None
    """The reason why answers of this model are never drafted; None if they may be."""
    model: str | None = None
    architecture: str | None = None
    dtype: str | None = None
    bytes: int | None = None
    """The bytes of the draft model's weights in memory."""
    head_bytes: int | None = None
    """The stored bytes of the answering model's own head; None if it has no head, or if a draft model drafts."""
    why_no_model: str | None = None
    """The reason why the draft model in the store cannot draft; None if it can, or if there is none."""

    @property
    def text(self) -> str:
        if self.why_not:
            return f"none: {self.why_not}"
        found = "from known text"
        if self.model:
            found += f", and by {self.model} ({self.architecture}, {self.dtype}, {sized(self.bytes or 0)})"
        if self.head_bytes is not None:
            found += f", and by the model's own head ({sized(self.head_bytes)})"
        if self.why_no_model:
            found += f"; the draft in the store is not used: {self.why_no_model}"
        return found if self.on else f"off; with --draft auto, {found}"


class DraftsWing(Wing):
    """Adds drafts to an engine: from known text and, in a single rank, by a model that drafts, if there is one."""

    name = "drafts"

    def __init__(self) -> None:
        self._opener: DraftModelOpener | None = None
        self._model: DraftModel | None = None

    def facts(self, settings: CheckSettings, found: Examined | None) -> Mapping[str, Facts | None]:
        """Returns the `DraftFacts` of a model. Raises ModelError if `--draft` names a model that cannot draft."""
        return {} if found is None else {"drafts": self._facts(settings, found)}

    def _facts(self, settings: CheckSettings, found: Examined) -> DraftFacts:
        from runner.drafts.heads.head_plan import plan_head

        on = settings.draft != DRAFT_OFF
        wish = settings.draft if on else DRAFT_AUTO
        why_not = found.loaded.undraftable or None
        try:
            named = find_draft(wish, settings.models_dir, found.model)
            if named is None:
                head = plan_head(found.model)
                return DraftFacts(on=on, why_not=why_not, head_bytes=None if head is None else head.opened.total_bytes)
            kind, draft = named
            named.check(found.model, found.loaded, found.tokenizer)
            rest = max(0, found.budget_bytes - found.types.nbytes(found.loaded.module))
            module, plan = kind.plan(draft, settings.dtype, rest)
        except ModelError as error:
            if wish != DRAFT_AUTO:
                raise ModelError(f"--draft {wish}: {error}") from error
            return DraftFacts(on=on, why_not=why_not, why_no_model=str(error))
        dtype, nbytes = plan.computes, plan.nbytes(module)
        return DraftFacts(on=on, model=draft.name, architecture=draft.architecture, dtype=dtype, bytes=nbytes)

    def reserve(self, parts: Parts) -> int:
        """Opens the model that drafts, and reserves its bytes. Raises the errors of `DraftModelOpener`."""
        if parts.ranks is None:
            self._opener = DraftModelOpener(parts.settings, parts.model)
        return self._opener.reserved_bytes(parts.budget_bytes) if self._opener is not None else 0

    def load(self, parts: Parts) -> None:
        """Loads the model that drafts. Raises the errors of `DraftModelOpener.load`."""
        if self._opener is not None:
            self._model = self._opener.load(parts.loaded, parts.tokenizer, parts.budget_bytes)

    def plug(self, parts: Parts) -> None:
        if self._model is not None:
            parts.forward = self._model.watch(parts.forward)
            parts.draft_bytes = self._model.most_bytes(min(parts.settings.parallel, self._model.most_together))
        if parts.settings.draft == DRAFT_OFF:
            return
        undraftable = parts.loaded.undraftable
        if undraftable:
            log.info("answers are not drafted", why=undraftable)
        most, at_once = parts.settings.draft_tokens, self._model is not None and self._model.at_once
        alone = parts.ranks is None  # other ranks would not skip padding
        skips_padding = parts.on_cpu and alone and cpu.skips_padding() and parts.loaded.is_packed
        costs = CPU_COSTS if parts.on_cpu else GPU_COSTS
        policy = DraftPolicy(most, costs, at_once=at_once, skips_padding=skips_padding)
        drafting = Drafting(policy, undraftable, parts.salt, self._model, parts.clock, parts.step_s)
        parts.drafter = drafting.drafter
        parts.rounds = partial(BatchRounds, drafting)
        parts.counts.drafts = drafting.counts
