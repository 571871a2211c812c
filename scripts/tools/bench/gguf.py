"""Writes a model of `family_models.py` as a GGUF file for llama.cpp: the same weights, in blocks of Q4_1.

`gguf.toml` has names and values by family. An affine group of 64 weights of 4 bits is two blocks with the same scale
and bias, so nothing is rounded; what is not packed is float32.
"""

import json
import struct
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from scripts.tools.bench.family_models import Config, config_of

Array = np.ndarray[Any, np.dtype[Any]]
Value = bool | int | float | str | Sequence[Any]
_F32, _Q4_1 = 0, 3
_BLOCK = _ALIGNMENT = 32
_TYPES = {int: (4, "<I"), float: (6, "<f"), bool: (7, "<?")}
_STRING, _LIST, _INT32 = 8, 9, 5
_NORMAL, _CONTROL = 1, 3


class _Tensor(NamedTuple):
    name: str
    shape: Sequence[int]
    kind: int
    data: Array


@cache
def _tables() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_name("gguf.toml").read_text())


def write(family: str, directory: Path, file: Path) -> None:
    """Writes the file of the model in this directory."""
    config = config_of(family)
    weights = mx.load(str(directory / "model.safetensors"))
    assert isinstance(weights, dict)
    tensors = [*_tensors(family, config, {name: np.array(array) for name, array in weights.items()})]
    values = {**_values(family, config), **_tokenizer(directory)}
    with file.open("wb") as out:
        out.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)))
        for key, value in values.items():
            out.write(_string(key) + _value(value))
        offset = 0
        for name, shape, kind, data in tensors:
            out.write(_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape)))
            out.write(struct.pack("<IQ", kind, offset))
            offset += data.nbytes + -data.nbytes % _ALIGNMENT
        for tensor in tensors:
            out.write(bytes(-out.tell() % _ALIGNMENT))
            out.write(tensor.data.tobytes())


def _values(family: str, config: Config) -> dict[str, Value]:
    table = _tables()[family]
    fields = _tables()["fields"].items()
    values = {key: config[field] for key, names in fields for field in names.split() if field in config}
    values |= table.get("values", {})
    architecture = table["architecture"]
    named = {f"{architecture}.{key}": cast("Value", value) for key, value in values.items()}
    return {"general.architecture": architecture, **named}


def _tokenizer(directory: Path) -> dict[str, Value]:
    document = json.loads((directory / "tokenizer.json").read_text())
    tokens = [*document["model"]["vocab"], *(each["content"] for each in document["added_tokens"])]
    end = len(tokens) - 1
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*[_NORMAL] * end, _CONTROL],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in document["model"]["merges"]],
        **{f"tokenizer.ggml.{name}_token_id": end for name in ("bos", "eos", "padding")},
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def _tensors(family: str, config: Config, weights: Mapping[str, Array]) -> Iterator[_Tensor]:
    for path, array in weights.items():
        module, _, kind = path.rpartition(".")
        packed = f"{module}.scales" in weights
        if packed and kind in ("scales", "biases"):
            continue
        packed = packed and kind == "weight"  # there may be a bias of its own
        data = _blocks(module, weights) if packed else _plain(family, path, array)
        for name, rows in _parts(family, config, _name(family, path), data):
            shape = (*rows.shape[:-2], rows.shape[-2] * _BLOCK) if packed else rows.shape
            yield _Tensor(name, shape, _Q4_1 if packed else _F32, rows)
    if family == "gemma4_text":  # of a full layer's pairs a quarter turns
        half = cast("int", config["global_head_dim"]) // 2
        turning = np.arange(half) < half // 4
        yield _Tensor("rope_freqs.weight", (half,), _F32, np.where(turning, 1, 1e30).astype(np.float32))


def _name(family: str, path: str) -> str:
    names = {**_tables()["names"], **_tables()[family].get("names", {})}
    _, layers, rest = path.rpartition("layers.")
    number, _, inner = rest.partition(".") if layers else ("", "", path.removeprefix("language_model."))
    inner = inner.removeprefix("model.").removeprefix("backbone.")
    block = f"blk.{number}." if layers else ""
    if inner in names:  # a parameter of its own
        return f"{block}{names[inner]}"
    module, _, kind = inner.rpartition(".")
    if layers and f"layers.{module}" in names:
        module = f"layers.{module}"
    return f"{block}{names[module]}.{kind}"


def _plain(family: str, path: str, array: Array) -> Array:
    """Returns a tensor that is not packed in the form that llama.cpp wants."""
    if path.endswith(("conv.weight", "conv1d.weight")):
        array = array.swapaxes(1, 2) if family == "kimi_linear" else array[..., 0]
    elif path.endswith("A_log"):
        array = -np.exp(array)
        array = array[:, None] if "mixer" in path else array
    elif path.endswith("mixer.D"):
        array = array[:, None]
    elif path.endswith("mixer.norm.weight"):
        array = array[None]  # by groups, of which there is one
    elif path.endswith("shared_expert_gate.weight"):
        array = array[0]
    elif family == "gemma3_text" and "norm" in path:
        array = array + 1
    return np.ascontiguousarray(array, np.float32)


def _blocks(module: str, weights: Mapping[str, Array]) -> Array:
    """Packs rows as Q4_1 [..., blocks, 20]: a scale and a bias of 16 bits, then 32 numbers, of which 16 are low."""
    words, scales, biases = (weights[f"{module}.{kind}"] for kind in ("weight", "scales", "biases"))
    octets = words.view(np.uint8)
    numbers = np.stack((octets & 15, octets >> 4), -1).reshape(*words.shape[:-1], -1, 2, _BLOCK // 2)
    nibbles = numbers[..., 0, :] | numbers[..., 1, :] << 4
    pairs = np.stack((scales, biases), -1).astype(np.float16).view(np.uint8)
    return np.concatenate((pairs.repeat(words.shape[-1] * 8 // _BLOCK // pairs.shape[-2], -2), nibbles), -1)


def _parts(family: str, config: Config, name: str, rows: Array) -> Iterator[tuple[str, Array]]:
    """Yields a tensor under its name, or cut and reordered by rows."""
    if family == "llama" and ("attn_q." in name or "attn_k." in name):  # pairs stand side by side there
        head = cast("int", config["head_dim"])
        rows = rows.reshape(-1, 2, head // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    if family == "qwen3_next" and "attn_qkv." in name:  # by key head: a query, a key, values and their gates
        heads, key = cast("int", config["linear_num_key_heads"]), cast("int", config["linear_key_head_dim"])
        of_head = rows.reshape(heads, -1, *rows.shape[1:])
        wide = (of_head.shape[1] - 2 * key) // 2
        *qkv, gate = np.split(of_head, (key, 2 * key, 2 * key + wide), 1)
        yield name.replace("qkv", "gate"), gate.reshape(-1, *rows.shape[1:])
        rows = np.concatenate([part.reshape(-1, *rows.shape[1:]) for part in qkv])
    yield name, rows


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, bool | int | float):
        number, form = _TYPES[type(value)]
        return struct.pack("<I", number) + struct.pack(form, value)
    first = value[0]
    if isinstance(first, str):
        return struct.pack("<IIQ", _LIST, _STRING, len(value)) + b"".join(map(_string, value))
    number, form = (_INT32, "i") if type(first) is int else (7, "?")
    return struct.pack("<IIQ", _LIST, number, len(value)) + struct.pack(f"<{len(value)}{form}", *value)
