"""The line of `mlx-runner check` about drafts: what would draft, from headers alone, by the parts that would do it."""

import msgspec

from runner.drafts.heads.load import plan_head
from runner.drafts.opening import find_draft
from runner.errors import ModelError
from runner.model import OpenedModel
from runner.model.weights.dtype import DtypePlan
from runner.model.weights.load import LoadedModel
from runner.settings import DRAFT_AUTO, DRAFT_OFF, CheckSettings
from runner.tokenizer import Tokenizer


class DraftFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What drafts answers, in addition to known text. The fields of a model are None if no model can."""

    on: bool
    """False with `--draft off`."""
    why_not: str | None = None
    """The reason why answers of this model are never drafted."""
    model: str | None = None
    architecture: str | None = None
    dtype: str | None = None
    bytes: int | None = None
    """The draft model's weights in memory."""
    head_bytes: int | None = None
    """What the model's own head for drafts takes as it is stored; None if it has none, or another model drafts."""
    why_no_model: str | None = None
    """The reason why the model that was to draft cannot."""


def draft_facts(
    settings: CheckSettings,
    model: OpenedModel,
    target: LoadedModel,
    types: DtypePlan,
    tokenizer: Tokenizer,
    budget_bytes: int,
    *,
    slow_blas: bool,
) -> DraftFacts:
    """Returns what would draft answers of a model that loads: `target`, made of placeholders. Raises ModelError if
    `--draft` names one that cannot."""
    on = settings.draft != DRAFT_OFF
    wish = settings.draft if on else DRAFT_AUTO
    why_not = target.undraftable or None
    try:
        found = find_draft(wish, settings.models_dir, model)
        if found is None:
            head = plan_head(model)
            return DraftFacts(on=on, why_not=why_not, head_bytes=None if head is None else head.nbytes)
        kind, draft = found
        found.check(model, target, tokenizer)
        rest = max(0, budget_bytes - types.nbytes(target.module))
        module, plan = kind.plan(draft, settings.dtype, rest, slow_blas=slow_blas)
    except ModelError as error:
        if wish != DRAFT_AUTO:
            raise ModelError(f"--draft {wish}: {error}") from error
        return DraftFacts(on=on, why_not=why_not, why_no_model=str(error))
    return DraftFacts(
        on=on,
        model=draft.name,
        architecture=draft.architecture,
        dtype=plan.computes,
        bytes=plan.nbytes(module),
    )
