"""Loads one rank's share of a model that is split over a group of processes. Owner: the engine thread.

Every rank reads all bytes, because tensors are read whole and then cut. Yet memory never holds more than the share and
one layer: tensors stay unread until the module is split, and are then evaluated layer by layer.
"""

import re
from collections import Counter
from pathlib import Path
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from runner.device import available_bytes
from runner.errors import ModelError, ReadError
from runner.logs import Log
from runner.model.opened import OpenedModel
from runner.model.progress import Progress
from runner.model.sources.safetensors import HeaderEntry, read_tensor_header
from runner.model.weights.assembly import assemble_module, map_arrays, rehearse
from runner.model.weights.dtype import DtypePlan, plan_dtypes
from runner.model.weights.loading import LoadedModel, finished
from runner.model.weights.packed import Arrays, Recipe
from runner.model.weights.parameters import parameters_of
from runner.model.weights.reading import FAULTS, file_fault, open_entries, parts_of, read_entries
from runner.process.limits import free_descriptors, raise_limit
from runner.ranks.split import part_of, split_fault

log = Log(__name__)

_LAYER = re.compile(r".*?\.\d+\.")
_SPARE_FILES = 64
"""The descriptors that stay free for sockets, logs and modules while lazy arrays keep their files open."""
_PIECES = 8
"""The number of pieces in which a layer is evaluated: the tensors read for a piece take memory beside it."""
_PIECE_BYTES = 64 << 20

Parameters = list[tuple[str, mx.array]]


def load_share(
    opened: OpenedModel, group: mx.distributed.Group, dtype: str = "keep", budget_bytes: int | None = None
) -> LoadedModel:
    """Loads the share of this rank, as `weights.loading.load` loads a whole model. All ranks of the group must call
    this. The smallest budget of all ranks applies to each share, so that all ranks choose the same types.

    Raises:
        ModelError: the model cannot be split over these ranks, or does not fit; nothing has been read then.
        ReadError: reading failed after these checks.
    """
    if (library := opened.family.library) is not None:
        raise ModelError(
            f"{opened.name} is a model of {library.title}, which cannot be split: serve it without --ranks"
        )
    whole, recipe = rehearse(opened)
    if fault := split_fault(opened, group.size(), whole):
        raise ModelError(fault)
    part = part_of(whole, group.size(), group.rank())
    own_bytes = mx.array(available_bytes() if budget_bytes is None else budget_bytes, mx.int64)
    smallest_bytes = cast("int", mx.distributed.all_min(own_bytes, group=group).item())
    types = plan_dtypes(dtype, part, smallest_bytes)
    types.log_choice()
    if budget_bytes is not None and (too_large := types.over_budget(smallest_bytes, part)):
        raise ModelError(f"on each of {group.size()} ranks, {too_large}")
    del whole, part
    try:
        return finished(opened, _filled(opened, recipe, types, group))
    except ModelError as error:
        raise ReadError(str(error)) from error


def _filled(opened: OpenedModel, recipe: Recipe, types: DtypePlan, group: mx.distributed.Group) -> Module:
    # Only the module may refer to the arrays, so that tensors are freed once they are cut.
    module = assemble_module(opened, _lazy_arrays(opened), recipe)
    module.shard(group)
    try:
        _settle(module, types, Progress(log, "loading", opened.total_bytes))
    except RuntimeError as error:
        for path in {part.file for part in parts_of(opened)}:
            read_tensor_header(path)  # raises the proper error if the file has changed
        raise ModelError(f"read {opened.name}: {error}") from error
    return module


def _lazy_arrays(opened: OpenedModel) -> dict[str, Arrays]:
    """Returns the arrays of every needed tensor. An array is read when it is first evaluated; until then its file stays
    open. If there are more files than this process may open, the smallest files are read immediately. Raises ModelError
    for a file that has changed since the model was opened."""
    raise_limit()
    entries = parts_of(opened)
    sizes = Counter[Path]()
    for entry in entries:
        sizes[entry.file] += entry.nbytes
    most = max(0, free_descriptors() - _SPARE_FILES)
    late: dict[Path, list[HeaderEntry]] = {file: [] for file, _ in sizes.most_common(most)}
    early: list[HeaderEntry] = []
    for entry in entries:
        late.get(entry.file, early).append(entry)
    loaded = read_entries(early, {}, lambda _: None)
    for path, group in late.items():
        try:
            loaded |= open_entries(group)
        except FAULTS as error:
            raise file_fault(path, error) from error
    return map_arrays(opened, loaded.__getitem__)


def _settle(module: Module, types: DtypePlan, progress: Progress) -> None:
    """Reads, cuts and converts the parameters of each layer in turn, the largest layer first, to save memory."""
    layers = _layers(module)
    share_bytes = sum(map(_sum_bytes, layers))
    done_bytes = read_bytes = 0
    for layer in layers:
        piece_bytes = min(_sum_bytes(layer) // _PIECES, _PIECE_BYTES)
        while layer:
            piece = [layer.pop()]
            while layer and _sum_bytes(piece) + layer[-1][1].nbytes <= piece_bytes:
                piece.append(layer.pop())
            done_bytes += _sum_bytes(piece)
            # Contiguous, since a parameter that is only a view of a tensor would keep all of it.
            piece = [(name, mx.contiguous(array.astype(types.dtype_of(name, array.dtype)))) for name, array in piece]
            module.load_weights(piece, strict=False)
            mx.eval([array for _, array in piece])
            mx.synchronize()  # the CPU backend frees its inputs asynchronously
            reached = progress.total * done_bytes // share_bytes
            progress.add(reached - read_bytes)
            read_bytes = reached
        mx.clear_cache()  # the next layer may need buffers of other sizes
    mx.eval(module.state)


def _layers(module: Module) -> list[Parameters]:
    """Returns the parameters by layer, the largest layer first. A parameter outside of all layers counts as a layer."""
    layers: dict[str, Parameters] = {}
    for name, array in parameters_of(module).items():
        match = _LAYER.match(name)
        layers.setdefault(match[0] if match else name, []).append((name, array))
    return sorted(layers.values(), key=_sum_bytes, reverse=True)


def _sum_bytes(parameters: Parameters) -> int:
    return sum(array.nbytes for _, array in parameters)
