"""Reads and checks the header of a safetensors file without touching the data.

MLX can safely load a file that passes the checks: every tensor lies inside the file, overlaps no other tensor, and has
as many bytes as its shape needs.
"""

import itertools
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple, TypeGuard

from runner import json_files
from runner.errors import ModelError
from runner.model.sources.foreign import HEAD_BYTES, refuse_foreign

_LENGTH_BYTES = 8
_LONGEST_HEADER_BYTES = 100_000_000
"""The limit of the format. It also limits the memory that a hostile file can take up."""
_LARGEST_SIZE = 2**31 - 1
"""MLX's limit for one dimension."""
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8,
    "F16": 2, "BF16": 2, "F32": 4, "C64": 8, "F8_E4M3": 1, "F8_E8M0": 1,
}  # fmt: skip
"""Bytes per element of every type that MLX can load."""
_MOST_DIMENSIONS = 16
"""A limit above any real tensor's number of dimensions. Multiplying a hostile file's million sizes would last hours."""
_SHOWN = 100
FLOAT_DTYPES = frozenset({"F16", "BF16", "F32"})


class HeaderEntry(NamedTuple):
    """One array in a file: the file's path, the array's key, type and shape, and the position of its first byte."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def read_tensor_header(path: Path, *, size_bytes: int | None = None) -> dict[str, HeaderEntry]:
    """Returns the arrays of one safetensors file by key. `size_bytes` is the file's size according to the manifest.
    Raises a ModelError that names the file, the key and the fault."""
    with open_file(path, size_bytes) as (file, found_bytes):
        prefix = file.read(_LENGTH_BYTES)
        if len(prefix) < _LENGTH_BYTES:
            raise ModelError(f"{path}: not a safetensors file: {found_bytes} bytes are too few for a header")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(found_bytes - _LENGTH_BYTES, _LONGEST_HEADER_BYTES):
            raise ModelError(f"{path}: header of {length} bytes does not fit a file of {found_bytes} bytes")
        text = file.read(length)
    return _checked(path, _parsed(path, text), _LENGTH_BYTES + length, found_bytes)


@contextmanager
def open_file(path: Path, size_bytes: int | None = None) -> Iterator[tuple[BufferedReader, int]]:
    """Opens a file, and yields the file and its size in bytes. The size must be `size_bytes`, unless that is None.

    Raises ModelError if opening fails, if reading inside the block fails, if the file is a pipe or a device, which
    might block, or if it is of another kind (`refuse_foreign`).
    """
    advice = "" if size_bytes is None else "; pull or create the model again"
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ModelError(f"open {path}: not a regular file{advice}")
        file = path.open("rb")
    except OSError as error:
        advice = "" if isinstance(error, PermissionError) else advice
        raise ModelError(f"open {path}: {os_reason(error)}{advice}") from error
    with file:
        found_bytes = os.fstat(file.fileno()).st_size
        try:
            refuse_foreign(path, os.pread(file.fileno(), HEAD_BYTES, 0))
            if size_bytes is not None and found_bytes != size_bytes:
                raise ModelError(f"{path}: size mismatch: want {size_bytes} bytes, found {found_bytes}{advice}")
            yield file, found_bytes
        except OSError as error:
            raise ModelError(f"read {path}: {os_reason(error)}") from error


def os_reason(error: OSError) -> str:
    """Returns the operating system's message in Go's spelling: `no such file or directory`."""
    return (error.strerror or str(error)).lower()


def _parsed(path: Path, text: bytes) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            raise ModelError(f"{path}: the header names a tensor twice")
        return entries

    try:
        header = json_files.parse(text, pairs_hook=unique)
    except ValueError as error:
        raise ModelError(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{path}: the header is not a JSON object")
    header.pop("__metadata__", None)  # null if MLX wrote it; ignored, because shapes decide
    return header


def _checked(path: Path, header: Mapping[str, object], header_bytes: int, found_bytes: int) -> dict[str, HeaderEntry]:
    data_bytes = found_bytes - header_bytes
    entries: dict[str, HeaderEntry] = {}
    spans: list[tuple[int, int, str]] = []
    for key, value in header.items():
        where = f"{path}: tensor {key}"
        if not isinstance(value, dict):
            raise ModelError(f"{where}: the header entry is not an object")
        dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
            raise ModelError(f"{where}: dtype {_clipped(dtype)} is not supported")
        if not _are_sizes(shape, _LARGEST_SIZE):
            raise ModelError(f"{where}: shape {_clipped(shape)} is not a list of sizes")
        if not _are_sizes(offsets, 2**63 - 1) or len(offsets) != 2:
            raise ModelError(f"{where}: data_offsets {_clipped(offsets)} are not two positions")
        start, stop = offsets
        entries[key] = entry = HeaderEntry(path, key, dtype, tuple(shape), header_bytes + start)
        if stop > data_bytes:
            raise ModelError(f"{where}: data ends at byte {stop}, the file holds {data_bytes}: it is truncated")
        if stop - start != entry.nbytes:
            raise ModelError(f"{where}: {dtype} {shape} needs {entry.nbytes} bytes, the header gives {stop - start}")
        if stop > start:
            spans.append((start, stop, key))
    spans.sort()
    for (_, stop, key), (start, _, other) in itertools.pairwise(spans):
        if start < stop:
            raise ModelError(f"{path}: tensors {key} and {other} overlap")
    return entries


def _are_sizes(value: object, most: int) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS:
        return False
    return all(type(item) is int and 0 <= item <= most for item in value)


def _clipped(value: object) -> str:
    """Returns a value from an untrusted file as a text that fits into a line."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
