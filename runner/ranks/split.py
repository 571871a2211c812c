"""Tries on placeholders whether the `shard` of an mlx-lm module can split a model over several processes.

mlx-lm mostly does not ask whether the number of ranks divides heads and widths: it fails in its first forward, or
computes with heads of another width. So a copy of the module is split as each end of the group would, and a prompt and
a token are built on it, but never evaluated. MLX checks shapes while it builds.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QQLinear
from mlx.utils import tree_flatten

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
from runner.model.weights.quantized_layers import GloballyScaledLinear, GloballyScaledSwitchLinear
from runner.model.weights.reading import FAULTS, file_fault, open_entries, parts_of, read_entries
from runner.process.limits import free_descriptors, raise_limit

log = Log(__name__)

USUAL_RANKS = (2, 3, 4, 6, 8)
"""The numbers of ranks that messages name."""

_UNCUT: dict[type[Module], str] = {
    GloballyScaledLinear: "weights with a global scale",
    GloballyScaledSwitchLinear: "weights with a global scale",
    QQLinear: "layers that quantize their inputs",
}
"""Layers that `shard` would cut without what makes them special."""
_COUNTS = {
    "num_attention_heads": "attention head",
    "linear_num_key_heads": "linear attention key head",
    "num_key_value_heads": "key head",
    "num_attention_groups": "key head",
}
"""Field of config.json -> what it counts. Some modules repeat key heads, so other faults come first."""
_TOKENS = ((0, 1, 2, 3), (4,))
"""A prompt and a token: modules have a way for each."""
_HEADS_AXIS = 1

Shapes = list[tuple[int, ...]]


def split_fault(opened: OpenedModel, ranks: int, whole: Module | None = None) -> str:
    """Returns the reason why a model cannot be split over `ranks` processes, with the numbers; empty if it can. Needs
    no group and reads no weights.

    `whole` is the module made of placeholders, if there is one already (`assembly.rehearse`); it is not changed. Raises
    ModelError if the model could not be loaded at all.
    """
    trial = _Trial(opened, whole or rehearse(opened)[0])
    fault = trial.fault_of(ranks)
    others = [str(each) for each in USUAL_RANKS if not trial.fault_of(each)] if fault else []
    return f"{fault}: use {' or '.join(filter(None, (', '.join(others[:-1]), others[-1])))}" if others else fault


def possible_ranks(opened: OpenedModel, whole: Module | None = None) -> list[int]:
    """Returns those of `USUAL_RANKS` over which the model can be split. The arguments are those of `split_fault`."""
    trial = _Trial(opened, whole or rehearse(opened)[0])
    return [ranks for ranks in USUAL_RANKS if not trial.fault_of(ranks)]


def part_of(whole: Module, ranks: int, rank: int) -> Module:
    """Returns the part of one rank, made of placeholders as `whole` is. Raises whatever `shard` does."""
    part = copy.deepcopy(whole)
    part.shard(cast("mx.distributed.Group", _NoGroup(ranks, rank)))
    return part


class _NoGroup:
    """A group as far as `shard` asks for it."""

    def __init__(self, size: int, rank: int) -> None:
        self._size = size
        self._rank = rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class _Trial:
    """Tries numbers of ranks on copies of one module."""

    def __init__(self, opened: OpenedModel, whole: Module) -> None:
        self._opened = opened
        self._whole = whole
        self._name = opened.family.import_name
        self._fault = "" if hasattr(whole, "shard") else self._name
        for layer in whole.modules() if not self._fault else ():
            self._fault = self._fault or _UNCUT.get(type(layer), "")
        self._scores: Shapes = []
        self._states: Shapes = []
        if not self._fault:
            try:
                self._scores, self._states = shapes_of(whole)
            except Exception as error:  # of any type, as below; serving reports it as a fault of the model
                self._fault = f"{self._name}, whose forward fails ({_words(error)}),"

    def fault_of(self, ranks: int) -> str:
        """Returns the reason why the module cannot be split over these ranks; empty if it can."""
        if self._fault:
            return f"{self._fault} cannot be split over several ranks"
        try:
            for rank in (0, ranks - 1):
                scores, states = shapes_of(part_of(self._whole, ranks, rank), ranks)
                if scores != self._scores or not _are_parts(self._states, states):
                    return self._reason(ranks, "its heads would become wider")
        except Exception as error:  # of any type: a division by zero, an assertion, a shape
            return self._reason(ranks, _words(error))
        return ""

    def _reason(self, ranks: int, why: str) -> str:
        text = self._opened.module_config.get("text_config")
        config = text if isinstance(text, Mapping) else self._opened.module_config
        for field, noun in _COUNTS.items():
            count = config.get(field)
            if isinstance(count, int) and count % ranks:
                return f"{count} {noun}{'s' if count != 1 else ''} cannot be split over {ranks} ranks"
        return f"{self._name} cannot be split over {ranks} ranks ({why})"


@contextmanager
def _no_communication(ranks: int) -> Iterator[None]:
    """Inside the block, collectives answer at once with an array of the right shape.

    Owner: the thread that owns MLX, on which nothing else runs meanwhile.
    """

    def all_sum(x: mx.array, **_: object) -> mx.array:
        return x

    def all_gather(x: mx.array, **_: object) -> mx.array:
        return mx.concatenate([x] * ranks)

    genuine = mx.distributed.all_sum, mx.distributed.all_gather
    mx.distributed.all_sum = all_sum
    mx.distributed.all_gather = all_gather
    try:
        yield
    finally:
        mx.distributed.all_sum, mx.distributed.all_gather = genuine


def shapes_of(module: Module, ranks: int = 1) -> tuple[Shapes, Shapes]:
    """Returns the shapes of the scores and of all state that two forwards of a rank leave, which nothing evaluates."""
    layers = cast("list[Any]", LoadedModel(module).make_layers())
    with _no_communication(ranks):
        scores = [module(mx.array([tokens]), cache=layers).shape for tokens in _TOKENS]
    states = cast("list[tuple[str, object]]", tree_flatten([layer.state for layer in layers]))
    return scores, [state.shape for _, state in states if isinstance(state, mx.array)]


def _are_parts(wholes: Sequence[tuple[int, ...]], parts: Sequence[tuple[int, ...]]) -> bool:
    """Returns True if each part is its whole, or has fewer heads or channels. Heads must be as wide as before."""
    return len(wholes) == len(parts) and all(_is_part(*pair) for pair in zip(wholes, parts, strict=True))


def _is_part(whole: tuple[int, ...], part: tuple[int, ...]) -> bool:
    if len(whole) != len(part):
        return False
    cut = [axis for axis, (one, other) in enumerate(zip(whole, part, strict=True)) if one != other]
    return not cut or (len(cut) == 1 and (len(whole) < 4 or cut == [_HEADS_AXIS]))


def _words(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    if group := re.search(r"quantization group size (\d+)", text):
        return f"packed rows would be cut within a group of {group[1]}"
    return text or type(error).__name__


# --- Loads one rank's share of a model that is split over a group of processes. Every rank reads every byte, since
# whole tensors are read and then cut. So that memory never holds more than the share and one layer, tensors stay
# unread until the module is split, and are then evaluated layer by layer. Owner: the engine thread.

_LAYER = re.compile(r".*?\.\d+\.")
_SPARE_FILES = 64
"""Descriptors for all else while lazy arrays keep their files open: sockets, logs, modules."""
_PIECES = 8
"""The pieces in which a layer is evaluated, since what its parameters are made of takes memory beside them."""
_PIECE_BYTES = 64 << 20

Parameters = list[tuple[str, mx.array]]


def load_share(
    opened: OpenedModel, group: mx.distributed.Group, dtype: str = "keep", budget_bytes: int | None = None
) -> LoadedModel:
    """Loads the share of this rank, as `weights.loading.load` loads a whole model. All ranks of the group must call
    this. The smallest of their budgets is for each share, lest they compute in different types.

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
    # Nothing but the module may refer to the arrays: what has been cut must be freed.
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
    """Returns the arrays of every needed tensor, which are read when they are first evaluated.

    Until then their files stay open. If those are more than this process may open, the smallest are read at once.
    Raises ModelError for a file that has changed since the model was opened.
    """
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
    """Reads, cuts and converts the parameters, the largest layer first, while memory holds little else."""
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
        mx.clear_cache()  # the next layer may be of other sizes
    mx.eval(module.state)


def _layers(module: Module) -> list[Parameters]:
    """Returns the parameters by layer, the largest first. What is in no layer is one of its own."""
    layers: dict[str, Parameters] = {}
    for name, array in parameters_of(module).items():
        match = _LAYER.match(name)
        layers.setdefault(match[0] if match else name, []).append((name, array))
    return sorted(layers.values(), key=_sum_bytes, reverse=True)


def _sum_bytes(parameters: Parameters) -> int:
    return sum(array.nbytes for _, array in parameters)
