"""Loading: the weights of an opened model, read in bounded groups, become an mlx-lm module.

Owner: the engine thread. Every array is made, read and evaluated on the thread that calls `load`.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

import runner.mlxlm  # noqa: F401  # registers mlx_lm without its __init__

# isort: split
from mlx_lm.models.cache import make_prompt_cache

from runner.errors import ModelError
from runner.logs import Log
from runner.model.checkpoint import Tensor
from runner.model.header import Entry, read_header
from runner.model.module import Arrays, assemble
from runner.model.opened import OpenedModel

log = Log(__name__)

_Sized = TypeVar("_Sized", Entry, mx.array)

_GROUP_TENSORS = 64
"""A lazy array keeps its file open, and macOS allows 256 open files."""
_GROUP_BYTES = 256 << 20
_LOG_EVERY_S = 1.0

_DTYPES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16, "U32": mx.uint32,
    "I32": mx.int32, "U64": mx.uint64, "I64": mx.int64, "F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32,
    "C64": mx.complex64, "F8_E4M3": mx.uint8, "F8_E8M0": mx.uint8,
}  # fmt: skip
"""How MLX represents the types of a file."""


class LoadedModel(NamedTuple):
    """A model ready to run, on the thread that loaded it."""

    module: Module

    def make_layers(self) -> list[object]:
        """Fresh layer caches for one sequence, one per layer that has a state."""
        return list(make_prompt_cache(self.module))

    def logits(self, tokens: mx.array, layers: list[object]) -> mx.array:
        """Runs `tokens` [B, L] after what `layers` hold, and advances them. Returns scores [B, L, V], not evaluated."""
        return cast("mx.array", self.module(tokens, cache=layers))


def load(opened: OpenedModel) -> LoadedModel:
    """Reads the weights and builds the module. Raises ModelError that names the file or tensor at fault.

    Shapes, names and types are checked against the module before the first byte is read.
    """
    assemble(opened, _each(opened, lambda entry: mx.zeros(entry.shape, _DTYPES[entry.dtype])))
    module = assemble(opened, _read(opened))
    # What sanitize made of the arrays is lazy still. `assemble` kept none of its inputs, so each group that is
    # evaluated lets go of what it was made from.
    for group in _grouped(array for _, array in cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters()))):
        mx.eval(group)
    mx.eval(module.state)
    return LoadedModel(module)


def _each(opened: OpenedModel, make: Callable[[Entry], mx.array]) -> dict[str, Arrays]:
    return {name: _arrays(tensor, make) for name, tensor in opened.tensors.items()}


def _arrays(tensor: Tensor, make: Callable[[Entry], mx.array]) -> Arrays:
    _, weight, *companions = tensor
    return Arrays(make(weight), *(make(part) if part is not None else None for part in companions))


def _grouped(items: Iterable[_Sized]) -> Iterator[list[_Sized]]:
    """Cuts a list so that no part has more items or (but for a single large one) bytes than allowed."""
    group: list[_Sized] = []
    group_bytes = 0
    for item in items:
        if group and (len(group) == _GROUP_TENSORS or group_bytes + item.nbytes > _GROUP_BYTES):
            yield group
            group, group_bytes = [], 0
        group.append(item)
        group_bytes += item.nbytes
    if group:
        yield group


def _read(opened: OpenedModel) -> dict[str, Arrays]:
    """The arrays of every tensor, evaluated group by group; says in the log how far it is."""
    entries = sorted(part for tensor in opened.tensors.values() for part in tensor.parts)  # file by file
    loaded: dict[Entry, mx.array] = {}
    done_bytes, total_bytes = 0, opened.total_bytes
    started = logged = time.monotonic()
    for group in _grouped(entries):
        loaded |= _read_group(group)
        done_bytes += sum(entry.nbytes for entry in group)
        now = time.monotonic()
        if now - logged >= _LOG_EVERY_S:
            logged = now
            percent = 100 * done_bytes // max(1, total_bytes)
            log.info("loading", percent=percent, bytes=done_bytes, total=total_bytes, seconds=round(now - started, 1))
    return _each(opened, loaded.__getitem__)


def _read_group(group: list[Entry]) -> dict[Entry, mx.array]:
    """Reads some arrays; when it returns, none of their files is open on its account."""
    try:
        files = {path: mx.load(str(path), format="safetensors") for path in {entry.file for entry in group}}
        arrays = {entry: cast("dict[str, mx.array]", files[entry.file])[entry.key] for entry in group}
        mx.eval(list(arrays.values()))
    except (RuntimeError, KeyError, OSError) as error:
        for path in {entry.file for entry in group}:
            read_header(path)  # names the file if it was cut or taken away since it was opened
        raise ModelError(f"read {group[0].file} (or a file after it): {error}") from error
    return arrays
