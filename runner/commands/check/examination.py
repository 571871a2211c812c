"""Examines a model for `mlx-runner check`: finds the model's facts and all faults, without reading weights.

Opening a model for serving stops at the first fault. Examining goes on, except with steps that would only report the
same fault in other words.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import msgspec
from mlx.nn.layers.base import Module

from runner.commands.check.digests import verify_digests
from runner.errors import FaultsError, ModelError
from runner.model.architectures import UNNEEDED, ChooseFamily, Config, Family, architecture_of, family_of
from runner.model.module_config import read_config, text_config
from runner.model.opened import OpenedModel, find_checkpoint, open_checkpoint
from runner.model.packing import WORD_BITS
from runner.model.sources.checkpoint import LogicalTensor, ModelCheckpoint
from runner.model.weights.assembly import build_module, rehearse
from runner.model.weights.dtype import DtypePlan
from runner.model.weights.model_args import Defaults
from runner.model.weights.parameters import parameters_of

_PARTS = {
    "draft": re.compile(r"draft[./]"),
    **UNNEEDED,
    "tied head": re.compile(r"(.+\.)?lm_head\."),
    "layers beyond the last": re.compile(r"(.+\.)?layers\.\d+\."),
}
OTHER = "other"
"""The name for tensors that match no pattern of `_PARTS`."""


class Amount(msgspec.Struct, frozen=True):
    """The number and size of tensors of one kind. A packed tensor counts as one, with its scales and biases."""

    name: str
    tensors: int
    bytes: int


class Examination(NamedTuple):
    """The result of `examine`. A field is None if a fault hides it. `problems` are the errors that serving raises."""

    checkpoint: ModelCheckpoint | None
    config: Config | None
    architecture: str | None
    family: Family | None
    opened: OpenedModel | None
    module: Module | None
    """The model with placeholders for its weights: arrays with shapes and types but no values."""
    defaults: Defaults
    """The fields that config.json lacks, with the defaults of mlx-lm or of this runner."""
    compared: bool
    """True if all readable tensors were compared with the module's parameters."""
    problems: list[ModelError]

    def file(self, name: str) -> bytes | None:
        """Returns a text file for the tokenizer. None if it is missing, or is a `config.json` with a fault."""
        if self.checkpoint is None or (name == "config.json" and self.config is None):
            return None
        return self.checkpoint.file(name)


def examine(model: str, models_dir: Path, *, digests: bool, choose: ChooseFamily = family_of) -> Examination:
    """Does every step of opening and loading a model that reads no weights. With `digests`, also hashes the blobs."""
    problems: list[ModelError] = []
    checkpoint = config = architecture = family = opened = module = None
    with collecting_faults(problems):
        checkpoint = find_checkpoint(model, models_dir, problems.append)
    if checkpoint is None:
        return Examination(None, None, None, None, None, None, {}, False, problems)
    with collecting_faults(problems):
        config = read_config(checkpoint)
        architecture = architecture_of(config, from_store=checkpoint.from_store)
        family = choose(architecture, config, from_store=checkpoint.from_store)
    if family is not None and (checkpoint.tensors or not checkpoint.unreadable):
        with collecting_faults(problems):
            opened = open_checkpoint(checkpoint, problems.append, choose=choose)
    compared = False
    if opened is not None:
        module, faults = _rehearsed(opened)
        compared = bool(module or faults)
        problems += faults
    if digests:
        mismatches: list[ModelError] = []
        verify_digests(checkpoint, (opened or checkpoint).tensors.values(), mismatches.append)
        problems += sorted(mismatches, key=str)
    defaults = _defaults(opened) if opened is not None and module is not None else {}
    return Examination(checkpoint, config, architecture, family, opened, module, defaults, compared, problems)


@contextmanager
def collecting_faults(problems: list[ModelError]) -> Iterator[None]:
    """Catches a ModelError of the block, and appends it to `problems`."""
    try:
        yield
    except ModelError as error:
        problems.append(error)


def _rehearsed(opened: OpenedModel) -> tuple[Module | None, Sequence[ModelError]]:
    try:
        return rehearse(opened)[0], ()
    except FaultsError as error:
        return None, error.faults
    except ModelError as error:
        return None, () if opened.unreadable else (error,)  # an unreadable file may be the cause


def _defaults(opened: OpenedModel) -> Defaults:
    family, text = opened.family, text_config(opened.config, opened.family)
    ours = {key: value for key, value in family.defaults.items() if text.get(key) is None and value}
    classes = build_module(opened)[1]
    return ours | {key: value for key, value in classes.items() if value is not None and key != "model_type"}


def skipped(checkpoint: ModelCheckpoint, tensors: Iterable[LogicalTensor]) -> list[Amount]:
    """Returns the amounts of tensors that are in the files but not in `tensors`, by part of the model (`_PARTS`)."""
    read = {tensor.weight for tensor in tensors}
    unread = [(tensor.name, tensor.nbytes) for tensor in checkpoint.tensors.values() if tensor.weight not in read]
    return _amounts((_part(name), 1, size) for name, size in (*unread, *checkpoint.draft_bytes.items()))


def _part(name: str) -> str:
    return next((part for part, pattern in _PARTS.items() if pattern.match(name)), OTHER)


def files(tensors: Iterable[LogicalTensor]) -> set[Path]:
    """Returns the files that hold the tensors."""
    return {part.file for tensor in tensors for part in tensor.parts}


_PACKED = ("weight", "scales", "biases", "global_scale")
"""The last words of the names of packed parameters."""


def contents(module: Module, types: DtypePlan) -> tuple[list[Amount], int]:
    """Returns the amounts of parameters by type (after conversion to `types`) or packing, and the number of values."""
    packed = {path: layer for path, layer in module.named_modules() if _is_packed(layer)}
    found: list[tuple[str, int, int]] = []
    parameters = 0
    for name, array in parameters_of(module).items():
        path, _, last = name.rpartition(".")
        layer = packed.get(path) if last in _PACKED else None
        counts = layer is None or last == "weight"
        dtype = types.dtype_of(name, array.dtype)
        kind, nbytes = _dtype(dtype) if layer is None else _packing(layer), array.size * dtype.size
        found.append((kind, counts, nbytes))
        if counts:
            parameters += array.size if layer is None else array.size * WORD_BITS // layer.bits
    return _amounts(found), parameters


def _is_packed(layer: Module) -> bool:
    return "scales" in layer and hasattr(layer, "bits") and hasattr(layer, "group_size")


def _packing(layer: Module) -> str:
    """Returns the name of a layer's packing: bits and group size for mode `affine`, the mode's name for any other."""
    mode = getattr(layer, "mode", "affine")
    return f"int{layer.bits} g{layer.group_size}" if mode == "affine" else str(mode)


def _dtype(dtype: mx.Dtype) -> str:
    """Returns the name of a type in the style of safetensors files, in lower case: `bf16`, `f32`, `u8`."""
    return re.sub("float|uint|int", lambda match: match[0][0], str(dtype).removeprefix("mlx.core."))


def _amounts(items: Iterable[tuple[str, int, int]]) -> list[Amount]:
    """Sums (name, tensors, bytes) by name. The name with the most bytes comes first."""
    tensors, sizes = Counter[str](), Counter[str]()
    for name, count, size in items:
        tensors[name] += count
        sizes[name] += size
    return [Amount(name, tensors[name], size) for name, size in sizes.most_common()]
