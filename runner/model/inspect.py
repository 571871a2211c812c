"""Everything that can be known of a model, and everything that is wrong with it, without reading its weights.

Opening a model for serving stops at the first fault. Here each step goes on with what the faults before it have left,
and is left out where it could only tell the same fault in other words.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, cast

import mlx.core as mx
import msgspec
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from runner.errors import FaultsError, ModelError
from runner.model.config import read_config, text_config
from runner.model.families import UNNEEDED, Config, Family, architecture_of, family_of
from runner.model.model_args import Defaults
from runner.model.opened import OpenedModel, find_checkpoint, open_checkpoint
from runner.model.packing import WORD_BITS
from runner.model.sources.checkpoint import Checkpoint, Tensor
from runner.model.sources.digests import verify_digests
from runner.model.weights.assemble import build_module, rehearse
from runner.model.weights.dtype import DtypePlan

_PARTS = {
    "draft": re.compile(r"draft[./]"),
    **UNNEEDED,
    "tied head": re.compile(r"(.+\.)?lm_head\."),
    "layers beyond the last": re.compile(r"(.+\.)?layers\.\d+\."),
}
OTHER = "other"
"""Tensors that belong to no part of a model that is known here."""
_COMPANIONS = ("scales", "biases", "global_scale")


class Amount(msgspec.Struct, frozen=True):
    """Tensors that have something in common. A packed one counts once, its bytes with scales and biases."""

    name: str
    tensors: int
    bytes: int


class Examination(NamedTuple):
    """How far the examination came; None for what could not be had. `problems` in the words of serving."""

    checkpoint: Checkpoint | None
    config: Config | None
    architecture: str | None
    family: Family | None
    opened: OpenedModel | None
    module: Module | None
    """On placeholders: shapes and types, no values."""
    defaults: Defaults
    """What counts where config.json says nothing: of mlx-lm's classes, and of ours."""
    compared: bool
    """Whether the tensors were held against the module, as far as they could be read."""
    problems: list[ModelError]

    def file(self, name: str) -> bytes | None:
        """A text file, as the tokenizer asks for it. A broken `config.json`, which has been told, is none."""
        if self.checkpoint is None or (name == "config.json" and self.config is None):
            return None
        return self.checkpoint.file(name)


def examine(model: str, models_dir: Path, *, digests: bool) -> Examination:
    """Takes every step of opening and of loading that reads no weights; `digests` also hashes them."""
    problems: list[ModelError] = []
    checkpoint = config = architecture = family = opened = module = None
    with collecting_faults(problems):
        checkpoint = find_checkpoint(model, models_dir, problems.append)
    if checkpoint is None:
        return Examination(None, None, None, None, None, None, {}, False, problems)
    with collecting_faults(problems):
        config = read_config(checkpoint)
        architecture = architecture_of(config, from_store=checkpoint.from_store)
        family = family_of(architecture, config, from_store=checkpoint.from_store)
    if family is not None and (checkpoint.tensors or not checkpoint.unreadable):
        with collecting_faults(problems):
            opened = open_checkpoint(checkpoint, problems.append)
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
    """Notes the fault that ends the block."""
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
        return None, () if opened.unreadable else (error,)  # with tensors lost it may only say that they are


def _defaults(opened: OpenedModel) -> Defaults:
    family, text = opened.family, text_config(opened.config, opened.family)
    ours = {key: value for key, value in family.defaults.items() if text.get(key) is None and value}
    classes = build_module(opened)[1]
    return ours | {key: value for key, value in classes.items() if value is not None and key != "model_type"}


def skipped(checkpoint: Checkpoint, opened: OpenedModel) -> list[Amount]:
    """The tensors that will not be read, by what they belong to."""
    read = {tensor.weight for tensor in opened.tensors.values()}
    unread = [(tensor.name, tensor.nbytes) for tensor in checkpoint.tensors.values() if tensor.weight not in read]
    return _amounts((_part(name), 1, size) for name, size in (*unread, *checkpoint.draft_bytes.items()))


def _part(name: str) -> str:
    return next((part for part, pattern in _PARTS.items() if pattern.match(name)), OTHER)


def files(tensors: Iterable[Tensor]) -> set[Path]:
    """Where the tensors lie."""
    return {part.file for tensor in tensors for part in tensor.parts}


def contents(module: Module, types: DtypePlan) -> tuple[list[Amount], int]:
    """What the module holds by type or packing once `types` are made of it, and how many parameters that is.

    A packed one counts as its values.
    """
    packed = {path: layer for path, layer in module.named_modules() if _is_packed(layer)}
    found: list[tuple[str, int, int]] = []
    parameters = 0
    for name, array in cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters())):
        path, _, last = name.rpartition(".")
        layer = packed.get(path) if last in ("weight", *_COMPANIONS) else None
        counts = layer is None or last == "weight"
        dtype = types.dtype_of(name, array.dtype)
        found.append((_dtype(dtype) if layer is None else _packing(layer), counts, array.size * dtype.size))
        if counts:
            parameters += array.size if layer is None else array.size * WORD_BITS // layer.bits
    return _amounts(found), parameters


def _is_packed(layer: Module) -> bool:
    return "scales" in layer and hasattr(layer, "bits") and hasattr(layer, "group_size")


def _packing(layer: Module) -> str:
    """Floating-point modes have one group size each, which their name implies. Layers of a module's own are affine."""
    mode = getattr(layer, "mode", "affine")
    return f"int{layer.bits} g{layer.group_size}" if mode == "affine" else str(mode)


def _dtype(dtype: mx.Dtype) -> str:
    """`bf16`, `f32`, `u8`: as short as files spell it."""
    return re.sub("float|uint|int", lambda match: match[0][0], str(dtype).removeprefix("mlx.core."))


def _amounts(items: Iterable[tuple[str, int, int]]) -> list[Amount]:
    """Sums (name, tensors, bytes) by name, the most bytes first."""
    tensors, sizes = Counter[str](), Counter[str]()
    for name, count, size in items:
        tensors[name] += count
        sizes[name] += size
    return [Amount(name, tensors[name], size) for name, size in sizes.most_common()]
