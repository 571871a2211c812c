"""A part of a model that is a module beside the text model: a tower, a head, an assistant, a DFlash draft.

Its steps are those of the text model (`load.load`): planned on placeholders, which finds every fault before a byte is
read; assembled of the arrays that were read; settled in the types of its plan.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from mlx.nn.layers.base import Module

from runner.errors import ModelError, ReadError
from runner.logs import Log
from runner.model.opened import OpenedModel
from runner.model.progress import Progress
from runner.model.weights.assemble import fill, placeholders
from runner.model.weights.dtype import DtypePlan, plan_dtypes
from runner.model.weights.experts import Weights
from runner.model.weights.load import settle
from runner.model.weights.packed import Arrays, Recipe, sanitize_packed
from runner.model.weights.reading import check_readable, parts_of, read_arrays

log = Log(__name__)
Part = TypeVar("Part", bound=Module)


def assemble_part(
    opened: OpenedModel, sanitize: Callable[[Weights], tuple[Part, Weights]], arrays: Mapping[str, Arrays]
) -> Part:
    """Builds the module with `arrays`, which stay lazy. `sanitize` makes it, and its weights of those that are stored.
    Raises ModelError if anything does not fit."""
    module, weights = sanitize_packed(lambda stored, _: sanitize(stored), arrays, Recipe("as stored"))
    fill(opened, module, weights)
    return cast("Part", module)


def plan_part(
    opened: OpenedModel,
    assemble: Callable[[Mapping[str, Arrays]], Part],
    dtype: str,
    budget_bytes: int | None,
) -> tuple[Part, DtypePlan]:
    """Returns the module made of placeholders, and the types of its weights. Raises ModelError if anything does not
    fit, or exceeds what the model has left of the budget."""
    rehearsed = assemble(placeholders(opened))
    types = plan_dtypes(dtype, rehearsed, budget_bytes)
    if too_large := types.over_budget(budget_bytes, rehearsed):
        raise ModelError(too_large)
    return rehearsed, types


def load_part(
    opened: OpenedModel,
    assemble: Callable[[Mapping[str, Arrays]], Part],
    name: str,
    dtype: str,
    budget_bytes: int | None,
) -> Part:
    """Loads the module, which the log calls `name`. The rest is as in `load.load`.

    Raises:
        ModelError: as `plan_part`.
        ReadError: reading failed after these checks.
    """
    types = plan_part(opened, assemble, dtype, budget_bytes)[1]
    return read_part(opened, assemble, name, types)


def read_part(
    opened: OpenedModel, assemble: Callable[[Mapping[str, Arrays]], Part], name: str, types: DtypePlan
) -> Part:
    """Loads a module that was planned. Raises ReadError if reading fails."""
    try:
        check_readable(parts_of(opened))
        module = assemble(read_arrays(opened, types, Progress(log, f"loading {name}", opened.total_bytes)))
    except ModelError as error:
        raise ReadError(str(error)) from error
    settle(module, types)
    return module
