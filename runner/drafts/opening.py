"""Which model drafts: the one that `--draft` names, the one that lies beside the model in the store, or its head."""

from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from runner.drafts.drafting import Drafting
from runner.drafts.heads.load import load_head
from runner.drafts.policy import DraftPolicy
from runner.engine.parts import Parts, Wing
from runner.errors import DraftError, ModelError
from runner.logs import Log, error_line
from runner.model import OpenedModel
from runner.model.weights.load import LoadedModel
from runner.settings import DRAFT_AUTO, DRAFT_OFF, Settings
from runner.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runner.drafts.named import AnyModel

log = Log(__name__)


def find_draft(wish: str, models_dir: Path, target: OpenedModel) -> OpenedModel | None:
    """Returns the model that is to draft, by its headers; None if there is none. `wish` is the value of `--draft`.
    Raises ModelError if there is one that cannot be used."""
    if wish == DRAFT_OFF or (wish == DRAFT_AUTO and not target.checkpoint.draft_bytes):
        return None
    from runner.drafts.named import open_named  # most models have none

    return open_named(wish, models_dir, target)


class DraftModelOpener:
    """Opens the model that drafts, in two steps around the loading of the target. If it cannot be used, it is refused
    if `--draft` names it, and else left out. Owner: the engine thread."""

    def __init__(self, settings: Settings, target: OpenedModel) -> None:
        """Reads headers alone. Raises DraftError for a model that is refused."""
        self._settings = settings
        self._target = target
        self._found: OpenedModel | None = None
        try:
            self._found = find_draft(settings.draft, settings.models_dir, target)
        except ModelError as error:
            self._give_up(error)

    def reserved_bytes(self, budget_bytes: int) -> int:
        """Returns what loading the target should leave of the budget for the draft model: nothing, where both are too
        large in any case."""
        if self._found is None or self._found.total_bytes + self._target.total_bytes > budget_bytes:
            return 0
        return self._found.total_bytes

    def load(
        self, loaded: LoadedModel, tokenizer: Tokenizer, budget_bytes: int, *, slow_blas: bool
    ) -> "AnyModel | None":
        """Loads the draft model, or with `auto`, where there is none, the head of the target; None if it has none.
        `loaded` and `tokenizer` are the target's, `budget_bytes` the limit for both. Raises as the constructor."""
        model = None
        if self._found is not None:
            model = self._load(self._found, loaded, tokenizer, budget_bytes, slow_blas=slow_blas)
        if model is None and self._settings.draft == DRAFT_AUTO and not loaded.undraftable:
            rest = max(0, budget_bytes - mx.get_active_memory())
            head, _ = load_head(self._target, loaded, self._settings.dtype, rest, slow_blas=slow_blas)
            if head is not None:
                from runner.drafts.named import HeadModel

                log.info("head for drafts loaded", bytes=head.nbytes)
                return HeadModel(head)
        return model

    def _load(
        self, found: OpenedModel, loaded: LoadedModel, tokenizer: Tokenizer, budget_bytes: int, *, slow_blas: bool
    ) -> "AnyModel | None":
        from runner.drafts.named import check_match, load_named

        try:
            check_match(found, self._target, loaded, tokenizer)
            rest = max(0, budget_bytes - mx.get_active_memory())
            model = load_named(found, loaded, self._settings.dtype, rest, slow_blas=slow_blas)
        except Exception as error:  # of MLX, at its first forward, too
            self._give_up(error)
            return None
        log.info("draft model loaded", model=found.name, architecture=found.architecture, bytes=found.total_bytes)
        return model

    def _give_up(self, error: Exception) -> None:
        why = str(error) if isinstance(error, ModelError) else error_line(error)
        if self._settings.draft != DRAFT_AUTO:
            raise DraftError(f"--draft {self._settings.draft}: {why}") from error
        log.info("the draft model beside this one is not used", why=why)


class DraftsWing(Wing):
    """Drafts, and the model that makes them, if there is one. A model in several ranks is drafted by what it reads."""

    def __init__(self) -> None:
        self._opener: DraftModelOpener | None = None
        self._model: AnyModel | None = None

    def reserve(self, parts: Parts) -> int:
        """Raises DraftError for a model that is refused."""
        if parts.world.ranks is None:
            self._opener = DraftModelOpener(parts.settings, parts.model)
        return self._opener.reserved_bytes(parts.budget_bytes) if self._opener is not None else 0

    def load(self, parts: Parts) -> None:
        """Raises as `reserve`."""
        if self._opener is not None:
            self._model = self._opener.load(
                parts.loaded, parts.tokenizer, parts.budget_bytes, slow_blas=parts.slow_blas
            )

    def plug(self, parts: Parts) -> None:
        if self._model is not None:
            parts.forward = self._model.watch(parts.forward)
            parts.draft_bytes = self._model.most_bytes
        if parts.settings.draft == DRAFT_OFF:
            return
        undraftable = parts.loaded.undraftable
        if undraftable:
            log.info("answers are not drafted", why=undraftable)
        make = DraftPolicy.for_cpu if parts.on_cpu else DraftPolicy.for_gpu
        policy = make(parts.settings.draft_tokens) if parts.settings.draft_tokens else make()
        drafting = Drafting(policy, undraftable, parts.salt, self._model, parts.sources.clock)
        parts.drafting = drafting
        parts.counts.drafts = drafting.counts
