"""Models on disk for `scripts/bench load`: the forms in which weights come.

The bytes are random and mean nothing, and a digest is made of a name: loading looks at neither.
"""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from runner.model.sources.name import manifest_path, parse_name
from scripts.tools.bench.micro.load.tensors import Tensor, dense, packed, sparse, stacked

_SHARDS = 8
_NOISE_BYTES = 1 << 22
_NAME = "bench"

_TENSOR = "application/vnd.ollama.image.tensor"
_JSON = "application/vnd.ollama.image.json"


class Made(NamedTuple):
    """A model on disk: what the runner calls it, and the files that hold its weights."""

    model: str
    models_dir: Path
    files: Sequence[Path]
    tensors: int
    weight_bytes: int

    @property
    def is_directory(self) -> bool:
        """True if mlx-lm can open it too."""
        return self.model != _NAME


class Form(NamedTuple):
    """A form of weights, and a function that writes one of about so many bytes into a folder, from a seed."""

    meaning: str
    make: Callable[[Path, int, int], Made]


class _Noise:
    """Random bytes from a seed, which repeat every few megabytes."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._bytes = memoryview(self._random.randbytes(_NOISE_BYTES))

    def write(self, file: BinaryIO, nbytes: int) -> None:
        start = self._random.randrange(_NOISE_BYTES)
        while nbytes:
            part = self._bytes[start : start + nbytes]
            file.write(part)
            nbytes -= len(part)
            start = 0


def _write_tensors(path: Path, tensors: Sequence[Tensor], noise: _Noise, *, aligned: bool = True) -> None:
    """A safetensors file; `aligned` as most writers pad it, else as MLX's does not."""
    header: dict[str, object] = {}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8 if aligned else 0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            noise.write(file, tensor.nbytes)


def _write_directory(
    folder: Path, config: dict[str, object], tensors: Sequence[Tensor], seed: int, *, shards: int = 1
) -> Made:
    """As Hugging Face keeps models: consecutive tensors in shards of about the same size."""
    directory = folder / "directory"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    noise = _Noise(seed)
    total = sum(tensor.nbytes for tensor in tensors)
    parts: list[list[Tensor]] = [[] for _ in range(shards)]
    done = 0
    for tensor in tensors:
        parts[done * shards // total].append(tensor)
        done += tensor.nbytes
    files = []
    for index, part in enumerate(part for part in parts if part):
        files.append(directory / f"model-{index + 1:05}-of-{shards:05}.safetensors")
        _write_tensors(files[-1], part, noise)
    return Made(str(directory), folder, files, len(tensors), total)


def _write_store(folder: Path, config: dict[str, object], blobs: Sequence[tuple[str, list[Tensor]]], seed: int) -> Made:
    """As `ollama create` does. A blob of several arrays is in MLX's form."""
    (folder / "blobs").mkdir()
    noise = _Noise(seed)
    layers: list[dict[str, object]] = []

    def place(media_type: str, name: str) -> tuple[Path, dict[str, object]]:
        digest = hashlib.sha256(name.encode()).hexdigest()
        return folder / "blobs" / f"sha256-{digest}", {
            "mediaType": media_type,
            "digest": f"sha256:{digest}",
            "name": name,
        }

    files = []
    for name, tensors in blobs:
        path, layer = place(_TENSOR, name)
        _write_tensors(path, tensors, noise, aligned=len(tensors) == 1)
        files.append(path)
        layers.append({**layer, "size": path.stat().st_size})
    for name, text in (("config.json", json.dumps(config)), ("tokenizer.json", "{}")):
        path, layer = place(_JSON, name)
        path.write_text(text)
        layers.append({**layer, "size": len(text)})
    manifest = manifest_path(folder, parse_name(_NAME))
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    arrays = [tensor for _, tensors in blobs for tensor in tensors]
    return Made(_NAME, folder, files, len(arrays), sum(tensor.nbytes for tensor in arrays))


def _one_file(folder: Path, nbytes: int, seed: int) -> Made:
    return _write_directory(folder, *dense(nbytes), seed)


def _shards(folder: Path, nbytes: int, seed: int) -> Made:
    return _write_directory(folder, *dense(nbytes), seed, shards=_SHARDS)


def _blobs(folder: Path, nbytes: int, seed: int) -> Made:
    config, tensors = dense(nbytes)
    return _write_store(folder, config, [(tensor.name, [tensor]) for tensor in tensors], seed)


def _packed_blobs(folder: Path, nbytes: int, seed: int) -> Made:
    config, tensors = dense(nbytes * 12 // 5)  # 16 bits become 6.7 on average
    return _write_store(folder, config, [(tensor.name, packed(tensor)) for tensor in tensors], seed)


def _stacks(folder: Path, nbytes: int, seed: int) -> Made:
    config, tensors = sparse(nbytes)
    return _write_store(folder, config, list(stacked(tensors)), seed)


def _experts_apart(folder: Path, nbytes: int, seed: int) -> Made:
    return _write_directory(folder, *sparse(nbytes), seed, shards=_SHARDS)


FORMS = {
    "file": Form("a directory with one file, bf16", _one_file),
    "shards": Form(f"a directory with {_SHARDS} files, bf16", _shards),
    "blobs": Form("a store with a blob for each tensor, bf16", _blobs),
    "packed": Form("a store with a blob for each tensor, int4 and int8", _packed_blobs),
    "stacks": Form("a store with the experts of a layer stacked, bf16", _stacks),
    "apart": Form("a directory with a tensor for each expert, bf16", _experts_apart),
}
