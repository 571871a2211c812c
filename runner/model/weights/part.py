"""A module beside the model: a head, an assistant, a DFlash draft, a tower.

It is planned on placeholders, assembled and loaded as the model is, within what that has left of the budget.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from mlx.nn.layers.base import Module

from runner.errors import ModelError
from runner.logs import Log
from runner.model.opened import OpenedModel
from runner.model.progress import Progress
from runner.model.weights.assemble import placeholders
from runner.model.weights.dtype import DtypePlan, plan_dtypes
from runner.model.weights.experts import Weights
from runner.model.weights.load import settle
from runner.model.weights.packed import Arrays, Recipe, sanitize_packed
from runner.model.weights.parameters import check_parameters, parameters_of
from runner.model.weights.quantized_layers import quantize_layers
from runner.model.weights.reading import check_readable, parts_of, read_arrays

log = Log(__name__)
Part = TypeVar("Part", bound=Module)


def assemble_part(
    opened: OpenedModel, sanitize: Callable[[Weights], tuple[Part, Weights]], arrays: Mapping[str, Arrays]
) -> Part:
    """Builds the module with `arrays`, which stay lazy. `sanitize` makes it, and its weights of those that are stored.
    Raises ModelError if anything does not fit."""
    found, weights = sanitize_packed(lambda stored, _: sanitize(stored), arrays, Recipe("as stored"))
    module = cast("Part", found)
    quantize_layers(opened, module, weights)
    module.eval()
    check_parameters(opened, parameters_of(module), weights)
    module.load_weights(list(weights.items()), strict=False)
    return module


def plan_part(
    opened: OpenedModel,
    assemble: Callable[[Mapping[str, Arrays]], Part],
    dtype: str,
    budget_bytes: int | None,
    *,
    slow_blas: bool,
) -> tuple[Part, DtypePlan]:
    """Returns the module made of placeholders, and the types of its weights. Raises ModelError if anything does not
    fit, or exceeds the budget."""
    rehearsed = assemble(placeholders(opened))
    types = plan_dtypes(dtype, rehearsed, budget_bytes, slow_blas=slow_blas)
    if too_large := types.over_budget(budget_bytes, rehearsed):
        raise ModelError(too_large)
    return rehearsed, types


def load_part(
    opened: OpenedModel,
    assemble: Callable[[Mapping[str, Arrays]], Part],
    name: str,
    dtype: str,
    budget_bytes: int | None,
    *,
    slow_blas: bool,
) -> Part:
    """Loads the module, which the log calls `name`. Raises as `plan_part`; the rest is as in `weights.load.load`."""
    types = plan_part(opened, assemble, dtype, budget_bytes, slow_blas=slow_blas)[1]
    return read_part(opened, assemble, name, types)


def read_part(
    opened: OpenedModel, assemble: Callable[[Mapping[str, Arrays]], Part], name: str, types: DtypePlan
) -> Part:
    """Loads a module that was planned."""
    check_readable(parts_of(opened))
    module = assemble(read_arrays(opened, types, Progress(log, f"loading {name}", opened.total_bytes)))
    settle(module, types)
    return module
