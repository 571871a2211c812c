"""The line of `mlx-runner check` about pictures: from headers alone, by the parts that would serve them."""

from collections.abc import Iterator
from math import isqrt

import msgspec

from runner.errors import MediaError, ModelError
from runner.model import OpenedModel
from runner.model.inspect import contents
from runner.pictures.families import Family
from runner.pictures.header import MAX_PIXELS
from runner.pictures.open import prepare
from runner.pictures.towers.load import TowerPlan, plan_weights
from runner.tokenizer import Tokenizer

_WIDTH = isqrt(MAX_PIXELS)
_HEIGHTS = range(250, _WIDTH + 1, 250)
"""Heights that are tried for a picture of that width: the shape decides how many tokens fit into a budget."""


class PictureFacts(msgspec.Struct, frozen=True, kw_only=True):
    """If the model sees none, `why` says why and the other fields are None."""

    sees: bool
    why: str | None = None
    tower: str | None = None
    blocks: int | None = None
    dtype: str | None = None
    bytes: int | None = None
    """The tower's weights in memory."""
    tokens: int | None = None
    """The most soft tokens of one picture."""


def picture_facts(
    model: OpenedModel,
    plan: TowerPlan | None,
    tokenizer: Tokenizer,
    dtype: str,
    budget_bytes: int,
    *,
    slow_blas: bool,
) -> PictureFacts:
    """Returns whether a model that loads would see. `plan` is its tower's, the arguments after it are the settings."""
    if plan is None:
        family = f"pictures are not known here for the family {model.family.module}"
        return PictureFacts(sees=False, why=family if model.has_vision else "a text model")
    try:
        support, _ = prepare(model, plan, tokenizer)
        tower, types = plan_weights(plan, dtype, budget_bytes, slow_blas=slow_blas)
    except ModelError as error:
        return PictureFacts(sees=False, why=str(error))
    amounts, _ = contents(tower, types)
    return PictureFacts(
        sees=True,
        tower=plan.family,
        blocks=plan.blocks,
        dtype=types.computes,
        bytes=sum(amount.bytes for amount in amounts),
        tokens=max(_tokens(support.family)),
    )


def _tokens(family: Family) -> Iterator[int]:
    """Yields the numbers of soft tokens of large pictures."""
    for height in _HEIGHTS:
        try:
            yield family.geometry(_WIDTH, height).tokens
        except MediaError:  # too narrow, or too wide
            continue
