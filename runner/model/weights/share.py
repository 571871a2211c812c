"""Loads one rank's share of a model that is split over a group of processes.

Every rank reads every byte, since whole tensors are read and then cut. So that memory never holds more than the share
and one layer, tensors stay unread until the module is split, and are then evaluated layer by layer.

Owner: the engine thread.
"""

import re
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from runner.errors import ModelError, ReadError
from runner.logs import Log
from runner.model.device import available_bytes
from runner.model.opened import OpenedModel
from runner.model.progress import Progress
from runner.model.weights.assemble import assemble, rehearse
from runner.model.weights.dtype import DtypePlan, plan_dtypes
from runner.model.weights.packed import Recipe
from runner.model.weights.parameters import parameters_of
from runner.model.weights.reading import lazy_arrays, reading_fault
from runner.model.weights.split import part_of, split

log = Log(__name__)

_LAYER = re.compile(r".*?\.\d+\.")
_PIECES = 8
"""A layer is evaluated in so many pieces, since what its parameters are made of takes memory beside them."""
_PIECE_BYTES = 64 << 20

Parameters = list[tuple[str, mx.array]]


def load_share(opened: OpenedModel, dtype: str, budget_bytes: int | None, group: mx.distributed.Group) -> Module:
    """Returns the module of this rank, evaluated. The smallest budget of all ranks is for each share, lest they compute
    in different types. Nothing is unpacked.

    Raises:
        ModelError: the model cannot be split over these ranks, or does not fit; nothing has been read then.
        ReadError: reading failed after these checks.
    """
    whole, recipe = rehearse(opened)
    if fault := split(opened, group.size(), whole).fault:
        raise ModelError(fault)
    part = part_of(whole, group.size(), group.rank())
    smallest_bytes = _smallest(available_bytes() if budget_bytes is None else budget_bytes, group)
    types = plan_dtypes(dtype, part, smallest_bytes, slow_blas=True)  # which unpacks nothing
    types.log_choice()
    if budget_bytes is not None and (too_large := types.over_budget(smallest_bytes, part)):
        raise ModelError(f"on each of {group.size()} ranks, {too_large}")
    del whole, part
    try:
        return _filled(opened, recipe, types, group)
    except ModelError as error:
        raise ReadError(str(error)) from error


def _smallest(budget_bytes: int, group: mx.distributed.Group) -> int:
    """Returns the smallest budget of all ranks."""
    return cast("int", mx.distributed.all_min(mx.array(budget_bytes, mx.int64), group=group).item())


def _filled(opened: OpenedModel, recipe: Recipe, types: DtypePlan, group: mx.distributed.Group) -> Module:
    # Nothing but the module may refer to the arrays: what has been cut must be freed.
    module = assemble(opened, lazy_arrays(opened), recipe)
    module.shard(group)
    try:
        _settle(module, types, Progress(log, "loading", opened.total_bytes))
    except RuntimeError as error:
        raise reading_fault(opened, error) from error
    return module


def _settle(module: Module, types: DtypePlan, progress: Progress) -> None:
    """Reads, cuts and converts the parameters, the largest layer first, while memory holds little else."""
    layers = _layers(module)
    share_bytes = sum(map(_nbytes, layers))
    done_bytes = read_bytes = 0
    for layer in layers:
        piece_bytes = min(_nbytes(layer) // _PIECES, _PIECE_BYTES)
        while layer:
            piece = [layer.pop()]
            while layer and _nbytes(piece) + layer[-1][1].nbytes <= piece_bytes:
                piece.append(layer.pop())
            done_bytes += _nbytes(piece)
            # Contiguous, since a parameter that is only a view of a tensor would keep all of it.
            piece = [(name, mx.contiguous(array.astype(types.dtype_of(name, array.dtype)))) for name, array in piece]
            module.load_weights(piece, strict=False)
            mx.eval([array for _, array in piece])
            mx.synchronize()  # a CPU lets go of what it has computed with a moment later
            reached = progress.total_bytes * done_bytes // share_bytes
            progress.add(reached - read_bytes)
            read_bytes = reached
        mx.clear_cache()  # the next layer may be of other sizes
    mx.eval(module.state)


def _layers(module: Module) -> list[Parameters]:
    """Returns the parameters by layer, the largest first. What is in no layer is one of its own."""
    layers: dict[str, Parameters] = {}
    for name, array in parameters_of(module).items():
        match = _LAYER.match(name)
        layers.setdefault(match[0] if match else name, []).append((name, array))
    return sorted(layers.values(), key=_nbytes, reverse=True)


def _nbytes(parameters: Parameters) -> int:
    return sum(array.nbytes for _, array in parameters)
