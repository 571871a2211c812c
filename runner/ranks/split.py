"""A trial on placeholders: finds whether an mlx-lm module's `shard` can split a model over several processes.

mlx-lm mostly does not check that the number of ranks divides heads and widths: then the first forward fails, or heads
get another width. So a copy of the module is split as for the first rank, and another as for the last. The graphs of
a prompt and of a token are built on each, but never evaluated: MLX checks shapes while it builds a graph.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QQLinear
from mlx.utils import tree_flatten

from runner.logs import Log
from runner.model.opened import OpenedModel
from runner.model.weights.assembly import rehearse
from runner.model.weights.loading import LoadedModel
from runner.model.weights.quantized_layers import GloballyScaledLinear, GloballyScaledSwitchLinear

log = Log(__name__)

USUAL_RANKS = (2, 3, 4, 6, 8)
"""The numbers of ranks that messages suggest."""

_UNCUT: dict[type[Module], str] = {
    GloballyScaledLinear: "weights with a global scale",
    GloballyScaledSwitchLinear: "weights with a global scale",
    QQLinear: "layers that quantize their inputs",
}
"""Layers that `shard` would wrongly cut like ordinary ones, with their names for messages."""
_COUNTS = {
    "num_attention_heads": "attention head",
    "linear_num_key_heads": "linear attention key head",
    "num_key_value_heads": "key head",
    "num_attention_groups": "key head",
}
"""The noun for what each field of config.json counts. Key heads come last, because some modules repeat them."""
_TOKENS = ((0, 1, 2, 3), (4,))
"""The tokens of the forwards: a prompt and a single token, because modules treat them differently."""
_HEADS_AXIS = 1

Shapes = list[tuple[int, ...]]


def split_fault(opened: OpenedModel, ranks: int, whole: Module | None = None) -> str:
    """Returns the reason why a model cannot be split over `ranks` processes, with the numbers. Empty if it can be
    split. Needs no group and reads no weights.

    `whole` is the module made of placeholders, if it exists already (`assembly.rehearse`); it is not changed. Raises
    ModelError if the model could not be loaded at all.
    """
    trial = _Trial(opened, whole or rehearse(opened)[0])
    fault = trial.fault_of(ranks)
    others = [str(each) for each in USUAL_RANKS if not trial.fault_of(each)] if fault else []
    return f"{fault}: use {' or '.join(filter(None, (', '.join(others[:-1]), others[-1])))}" if others else fault


def possible_ranks(opened: OpenedModel, whole: Module | None = None) -> list[int]:
    """Returns the numbers in `USUAL_RANKS` over which the model can be split. Arguments: as for `split_fault`."""
    trial = _Trial(opened, whole or rehearse(opened)[0])
    return [ranks for ranks in USUAL_RANKS if not trial.fault_of(ranks)]


def part_of(whole: Module, ranks: int, rank: int) -> Module:
    """Returns the part of `rank`, made of placeholders as `whole` is. Raises the errors of `shard`."""
    part = copy.deepcopy(whole)
    part.shard(cast("mx.distributed.Group", _NoGroup(ranks, rank)))
    return part


class _NoGroup:
    """The methods of a group that `shard` calls."""

    def __init__(self, size: int, rank: int) -> None:
        self._size = size
        self._rank = rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class _Trial:
    """A trial of several numbers of ranks on copies of one module."""

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
            except Exception as error:  # of any type; serving reports it as a fault of the model
                self._fault = f"{self._name}, whose forward fails ({_words(error)}),"

    def fault_of(self, ranks: int) -> str:
        """Returns the reason why the module cannot be split over `ranks` ranks. Empty if it can be split."""
        if self._fault:
            return f"{self._fault} cannot be split over several ranks"
        try:
            for rank in (0, ranks - 1):
                scores, states = shapes_of(part_of(self._whole, ranks, rank), ranks)
                if scores != self._scores or not _are_parts(self._states, states):
                    return self._reason(ranks, "its heads would become wider")
        except Exception as error:  # of any type: a division by zero, an assertion, a wrong shape
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
    """A block in which collectives return immediately, with an array of the right shape.

    Owner: the thread that owns MLX, on which no other computation runs meanwhile.
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
    """Returns the shapes of the scores of two forwards of a rank, and of all state after them. Evaluates nothing."""
    layers = cast("list[Any]", LoadedModel(module).make_layers())
    with _no_communication(ranks):
        scores = [module(mx.array([tokens]), cache=layers).shape for tokens in _TOKENS]
    states = cast("list[tuple[str, object]]", tree_flatten([layer.state for layer in layers]))
    return scores, [state.shape for _, state in states if isinstance(state, mx.array)]


def _are_parts(wholes: Sequence[tuple[int, ...]], parts: Sequence[tuple[int, ...]]) -> bool:
    """Returns True if each part equals its whole, or has fewer heads or channels, with heads of the same width."""
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
