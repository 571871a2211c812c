"""Models on disk for `scripts/bench load`: the forms in which weights come, of random bytes, as large as wanted.

The widths follow from the size; the numbers of layers and experts are fixed. The bytes mean nothing, and a digest is
made of a name: loading looks at neither.
"""

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from runner.model.name import manifest_path, parse_name

_LAYERS = 24
_SPARSE_LAYERS = 4
_EXPERTS = 32
_SHARDS = 8
_GROUP = 64
_NOISE_BYTES = 1 << 22
_DTYPE_BYTES = {"BF16": 2, "U32": 4}
_NAME = "bench"

_TENSOR = "application/vnd.ollama.image.tensor"
_JSON = "application/vnd.ollama.image.json"


class Tensor(NamedTuple):
    """One array of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPE_BYTES[self.dtype]


class Made(NamedTuple):
    """A model on disk: what the runner calls it, and the files that hold its weights."""

    model: str
    models_dir: Path
    files: Sequence[Path]
    tensors: int
    weight_bytes: int

    @property
    def is_directory(self) -> bool:
        """Whether mlx-lm can open it too."""
        return self.model != _NAME


class Form(NamedTuple):
    """What a form is, and how to write one of about so many bytes into a folder, from a seed."""

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


# --- tensors by a source's names ---


def _dense(nbytes: int) -> tuple[dict[str, object], list[Tensor]]:
    """A Llama: per layer 12 matrices as large as a width squared, and 16 for tokens in and out."""
    hidden = _width(nbytes, 12 * _LAYERS + 16)
    config = {**_config("llama", "LlamaForCausalLM", hidden, _LAYERS), "intermediate_size": 3 * hidden}
    tensors = _outside(hidden)
    for layer in range(_LAYERS):
        tensors += _attention(layer, hidden)
        tensors += [
            _matrix(f"model.layers.{layer}.mlp.{name}.weight", *shape)
            for name, shape in _projections(hidden, 3 * hidden).items()
        ]
    return config, tensors


def _sparse(nbytes: int) -> tuple[dict[str, object], list[Tensor]]:
    """A Qwen3-MoE, experts apart: each has 3 matrices of 3/8 of a width squared."""
    hidden = _width(nbytes, _SPARSE_LAYERS * (3 + _EXPERTS * 3 * 3 // 8) + 16)
    width = hidden * 3 // 8
    config = {
        **_config("qwen3_moe", "Qwen3MoeForCausalLM", hidden, _SPARSE_LAYERS),
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": width,
        "num_experts": _EXPERTS,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    tensors = _outside(hidden)
    for layer in range(_SPARSE_LAYERS):
        tensors += _attention(layer, hidden)
        tensors += [_vector(f"model.layers.{layer}.self_attn.{name}_norm.weight", 64) for name in "qk"]
        tensors.append(_matrix(f"model.layers.{layer}.mlp.gate.weight", _EXPERTS, hidden))
        tensors += [
            _matrix(f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight", *shape)
            for expert in range(_EXPERTS)
            for name, shape in _projections(hidden, width).items()
        ]
    return config, tensors


def _width(nbytes: int, squares: int) -> int:
    """The multiple of 128, or 64, at which so many squares of bf16 make up about so many bytes."""
    return max(64, round(math.sqrt(nbytes / 2 / squares) / 128) * 128)


def _config(model_type: str, architecture: str, hidden: int, layers: int) -> dict[str, object]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 128),
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": 8 * hidden,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


def _outside(hidden: int) -> list[Tensor]:
    return [
        _matrix("model.embed_tokens.weight", 8 * hidden, hidden),
        _matrix("lm_head.weight", 8 * hidden, hidden),
        _vector("model.norm.weight", hidden),
    ]


def _attention(layer: int, hidden: int) -> list[Tensor]:
    few = max(1, hidden // 128) * 64
    rows = {"q_proj": hidden, "k_proj": few, "v_proj": few, "o_proj": hidden}
    return [
        *(_matrix(f"model.layers.{layer}.self_attn.{name}.weight", count, hidden) for name, count in rows.items()),
        _vector(f"model.layers.{layer}.input_layernorm.weight", hidden),
        _vector(f"model.layers.{layer}.post_attention_layernorm.weight", hidden),
    ]


def _projections(hidden: int, width: int) -> dict[str, tuple[int, int]]:
    return {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}


def _matrix(name: str, rows: int, columns: int) -> Tensor:
    return Tensor(name, "BF16", (rows, columns))


def _vector(name: str, length: int) -> Tensor:
    return Tensor(name, "BF16", (length,))


# --- what Ollama makes of them ---


def _packed(tensor: Tensor) -> list[Tensor]:
    """As `create --quantize int4` mixes: four bits, eight where it matters more, norms and embeddings untouched."""
    if len(tensor.shape) == 1 or "embed" in tensor.name:
        return [tensor]
    rows, columns = tensor.shape
    bits = 8 if any(part in tensor.name for part in ("k_proj", "v_proj", "down_proj", "lm_head")) else 4
    scales = (rows, columns // _GROUP)
    return [
        Tensor(tensor.name, "U32", (rows, columns * bits // 32)),
        Tensor(f"{tensor.name}.scale", "BF16", scales),
        Tensor(f"{tensor.name}.bias", "BF16", scales),
    ]


def _stacked(tensors: Sequence[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """One blob per tensor, but one for all experts of a layer."""
    experts: dict[str, dict[str, Tensor]] = {}
    for tensor in tensors:
        head, found, tail = tensor.name.partition(".experts.")
        if not found:
            yield tensor.name, [tensor]
            continue
        name = f"{head}.experts.{tail.partition('.')[2]}"
        experts.setdefault(f"{head}.experts", {})[name] = Tensor(name, tensor.dtype, (_EXPERTS, *tensor.shape))
    yield from ((layer, list(stacks.values())) for layer, stacks in experts.items())


# --- files ---


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


# --- forms ---


def _one_file(folder: Path, nbytes: int, seed: int) -> Made:
    return _write_directory(folder, *_dense(nbytes), seed)


def _shards(folder: Path, nbytes: int, seed: int) -> Made:
    return _write_directory(folder, *_dense(nbytes), seed, shards=_SHARDS)


def _blobs(folder: Path, nbytes: int, seed: int) -> Made:
    config, tensors = _dense(nbytes)
    return _write_store(folder, config, [(tensor.name, [tensor]) for tensor in tensors], seed)


def _packed_blobs(folder: Path, nbytes: int, seed: int) -> Made:
    config, tensors = _dense(nbytes * 12 // 5)  # 16 bits become 6.7 on average
    return _write_store(folder, config, [(tensor.name, _packed(tensor)) for tensor in tensors], seed)


def _stacks(folder: Path, nbytes: int, seed: int) -> Made:
    config, tensors = _sparse(nbytes)
    return _write_store(folder, config, list(_stacked(tensors)), seed)


def _experts_apart(folder: Path, nbytes: int, seed: int) -> Made:
    return _write_directory(folder, *_sparse(nbytes), seed, shards=_SHARDS)


FORMS = {
    "file": Form("a directory with one file, bf16", _one_file),
    "shards": Form(f"a directory with {_SHARDS} files, bf16", _shards),
    "blobs": Form("a store with a blob for each tensor, bf16", _blobs),
    "packed": Form("a store with a blob for each tensor, int4 and int8", _packed_blobs),
    "stacks": Form("a store with the experts of a layer stacked, bf16", _stacks),
    "apart": Form("a directory with a tensor for each expert, bf16", _experts_apart),
}
