"""The line of `mlx-runner check` about ranks: over how many a model can be split, and what each would hold."""

import msgspec

from runner.model.inspect import Examination
from runner.model.weights.dtype import plan_dtypes
from runner.model.weights.split import part_of, possible_ranks, split


class RankShare(msgspec.Struct, frozen=True):
    """A number of ranks, and the bytes of weights that each of them would hold in memory."""

    ranks: int
    bytes: int


class RankFacts(msgspec.Struct, frozen=True):
    """Either `shares`, by the number of ranks, or `why_not`."""

    shares: list[RankShare]
    why_not: str | None = None


def rank_facts(found: Examination, dtype: str, budget_bytes: int) -> RankFacts | None:
    """Returns what can be done with a model; None if a fault hides it. The arguments after it are settings."""
    model, whole = found.opened, found.module
    if model is None or whole is None:
        return None
    parts = {ranks: part_of(whole, ranks, 0) for ranks in possible_ranks(model, whole)}
    if not parts:
        return RankFacts([], split(model, 2, whole).fault)
    # As in `share.load_share`, nothing is unpacked.
    plans = {ranks: plan_dtypes(dtype, part, budget_bytes, slow_blas=True) for ranks, part in parts.items()}
    return RankFacts([RankShare(ranks, plans[ranks].nbytes(part)) for ranks, part in parts.items()])
