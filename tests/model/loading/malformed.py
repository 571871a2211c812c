"""Every way to break a store (docs/internals/store.md, 6), with the complete error line.

The names of the cases are the ids of the tests. Each case starts from the same sound llama, `tiny`.
"""

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from scripts.tools.models.store import CONFIG, JSON, TENSOR, Store
from scripts.tools.models.tensors import PACKINGS, Tensor, quantize, safetensors_bytes

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
_ROOT = r"/\S+"
_MANIFEST = rf"{_ROOT}/manifests/registry\.ollama\.ai/library/tiny/latest"
_BLOB = rf"{_ROOT}/blobs/sha256-[0-9a-f]{{64}}"
_AT = rf"layer {WEIGHT}: {_BLOB}: "
_TENSOR_AT = rf"{_AT}tensor {WEIGHT}: "
_TOO_DEEP = "nested deeper than 100"
_AGAIN = "pull or create the model again"

Break = Callable[[Store], object]


class Case(NamedTuple):
    """`line` is a regular expression for the whole line."""

    spoil: Break
    line: str

    def matches(self, text: str) -> bool:
        return re.fullmatch(self.line, text) is not None


def entry(dtype: str = "F32", shape: object = (64, 64), offsets: object = (0, 16384)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def zeros(dtype: str, *shape: int) -> Tensor:
    return Tensor(dtype, shape, bytes(math.prod(shape) * {"F32": 4, "U32": 4, "U8": 1, "F16": 2, "I32": 4}[dtype]))


def file_start(header: object) -> bytes:
    """Returns a safetensors file up to its data; a header of bytes is used unchanged."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def with_header(header: object, data_bytes: int = 16384) -> Break:
    """Replaces one weight by a file with this header and zeros as data."""
    return lambda store: store.put(WEIGHT, file_start(header) + bytes(data_bytes), TENSOR)


def with_data(data: bytes) -> Break:
    """Replaces one weight by a file of this content."""
    return lambda store: store.put(WEIGHT, data, TENSOR)


def with_manifest(**changes: object) -> Break:
    def apply(store: Store) -> None:
        store.manifest = {**store.manifest, **changes}

    return apply


def with_layer(name: str = WEIGHT, **changes: object) -> Break:
    """Changes the manifest's entry of one layer."""

    def apply(store: Store) -> None:
        layers = [{**layer, **changes} if layer.get("name") == name else layer for layer in store.layers]
        store.manifest = {**store.manifest, "layers": layers}

    return apply


def with_model_config(content: object) -> Break:
    """Replaces the blob that describes the model to Ollama."""

    def apply(store: Store) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        store.manifest = {**store.manifest, "config": store.add_blob(data, CONFIG)}

    return apply


def with_config(**changes: object) -> Break:
    """Changes fields of the model's `config.json`."""

    def apply(store: Store) -> None:
        config: Mapping[str, object] = json.loads(store.blob_of("config.json").read_text())
        store.put_json("config.json", {**config, **changes})

    return apply


def with_packed(**changes: Tensor | None) -> Break:
    """Stores a packed weight whose parts (`words`, `scale`, `bias`) are changed, or left out if None."""

    def apply(store: Store) -> None:
        parts = quantize(store.tensors(WEIGHT)[WEIGHT], WEIGHT, PACKINGS["int4"])
        for part, tensor in changes.items():
            key = WEIGHT if part == "words" else f"{WEIGHT}.{part}"
            parts.pop(key)
            if tensor is not None:
                parts[key] = tensor
        store.put_tensors(WEIGHT, parts)

    return apply


def with_weight(tensor: Tensor) -> Break:
    return lambda store: store.put_tensors(WEIGHT, {WEIGHT: tensor})


def without(name: str) -> Break:
    return lambda store: store.drop(name)


def without_blob(name: str) -> Break:
    return lambda store: store.blob_of(name).unlink()


def with_text(name: str, data: bytes) -> Break:
    return lambda store: store.put(name, data, JSON)


def cut(name: str, less: int = 100) -> Break:
    def apply(store: Store) -> None:
        path = store.blob_of(name)
        path.write_bytes(path.read_bytes()[:-less])

    return apply


def replaced(make: Callable[[Path], object], name: str = WEIGHT) -> Break:
    """Replaces the blob by something else."""

    def apply(store: Store) -> None:
        path = store.blob_of(name)
        path.unlink()
        make(path)

    return apply


def sparse(name: str, size_bytes: int, first: bytes = b"") -> Break:
    """Makes a sparse blob of the size in the manifest, with only the first bytes on disk."""

    def apply(store: Store) -> None:
        digest = f"sha256:{hashlib.sha256(first).hexdigest()}"
        with store.blob(digest).open("wb") as file:
            file.write(first)
            file.truncate(size_bytes)
        with_layer(name, digest=digest, size=size_bytes)(store)

    return apply


def flip(name: str) -> Break:
    """Changes the content but not the size, so that only a digest shows it."""

    def apply(store: Store) -> None:
        path = store.blob_of(name)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    return apply


def each(*spoils: Break) -> Break:
    """Applies several changes in turn."""

    def apply(store: Store) -> None:
        for spoil in spoils:
            spoil(store)

    return apply


def write_manifest(text: str) -> Break:
    return lambda store: store.manifest_path.write_text(text)


GONE = f"sha256:{'0' * 64}"
GIGABYTES = 1 << 36  # 64 GiB

_LARGE = file_start({WEIGHT: entry(shape=(1 << 17, 1 << 17), offsets=(0, GIGABYTES))})

_DIGESTS = {
    "out of the store": "sha256:../../../etc/passwd",
    "too long": f"{GONE}0",
    "no hexadecimal": f"{GONE[:-1]}g",
    "with a newline": f"{GONE}\n",
    "absent": None,
}

MANIFESTS: dict[str, Case] = {
    "manifest missing": Case(
        lambda store: store.manifest_path.unlink(),
        rf"read manifest: open {_MANIFEST}: no such file or directory \(`ollama list` .*, --models-dir another store\)",
    ),
    "manifest not json": Case(write_manifest('{"layers": ['), rf"parse manifest: {_MANIFEST}: Expecting value: .*"),
    "manifest a list": Case(write_manifest("[]"), rf"parse manifest: {_MANIFEST}: want a JSON object, found list"),
    "manifest deep": Case(write_manifest("[" * 100_000), rf"parse manifest: {_MANIFEST}: .*{_TOO_DEEP}"),
    "manifest with a deep part": Case(
        write_manifest(f'{{"layers": {"[" * 900}{"]" * 900}}}'), rf"parse manifest: {_MANIFEST}: .*{_TOO_DEEP}"
    ),
    "manifest of gigabytes": Case(
        lambda store: os.truncate(store.manifest_path, GIGABYTES),
        rf"read manifest: {_MANIFEST}: {GIGABYTES} bytes are too many for a text file",
    ),
    "no list of layers": Case(
        with_manifest(layers=None), rf"parse manifest: {_MANIFEST}: want a list of layers, found None"
    ),
    "layer no object": Case(
        with_manifest(layers=["x"]), rf"parse manifest: {_MANIFEST}: a layer is not an object: 'x'"
    ),
    "no tensor layers": Case(
        with_manifest(layers=[]),
        rf"model tiny has no tensor layers \(a GGUF model, which stays with Ollama\?\): {_MANIFEST}",
    ),
    **{
        f"digest {what}": Case(
            with_layer(digest=digest),
            rf"parse manifest: {_MANIFEST}: invalid digest {re.escape(repr(digest))} of layer '{WEIGHT}'",
        )
        for what, digest in _DIGESTS.items()
    },
    "size negative": Case(with_layer(size=-1), rf"parse manifest: {_MANIFEST}: invalid size -1 of layer '{WEIGHT}'"),
    "format gguf": Case(
        with_model_config({"model_format": "gguf"}),
        r"model tiny has the format 'gguf', want 'safetensors' \(`ollama create` makes such models; GGUF stays with"
        rf" Ollama\): {_BLOB}",
    ),
}

_UNOPENED: dict[str, tuple[Break, str]] = {
    "missing": (without_blob(WEIGHT), "no such file or directory"),
    "a directory": (replaced(Path.mkdir), "is a directory"),
    "a pipe": (replaced(os.mkfifo), "not a regular file"),
    "a link to itself": (replaced(lambda path: path.symlink_to(path)), "too many levels of symbolic links"),
}

_CONTENTS = {
    "blob of seven bytes": (b"1234567", "not a safetensors file: 7 bytes are too few for a header"),
    "header longer than the file": (
        struct.pack("<Q", 2**63) + b"{}",
        f"header of {2**63} bytes does not fit a file of 10 bytes",
    ),
}

_HEADERS: dict[str, tuple[object, str]] = {
    "header not json": (b"{nonsense", "the header is not JSON: Expecting property name .*"),
    "header deep": (b"[" * 100_000, f"the header is not JSON: .*{_TOO_DEEP}"),
    "header a list": ([], "the header is not a JSON object"),
    "key twice in a header": (b'{"a": 1, "a": 2}', "the header names a tensor twice"),
    "tensors overlap": (
        {WEIGHT: entry(), "other": entry(shape=(16, 64), offsets=(4096, 8192))},
        f"tensors {WEIGHT} and other overlap",
    ),
    "layout of before 0.16": ({"data": entry()}, r"stored by Ollama before 0\.16; create or pull the model again"),
}

_ENTRIES: dict[str, tuple[object, str]] = {
    "entry no object": (1, "the header entry is not an object"),
    "dtype unknown": (entry("F64", (32, 64)), "dtype 'F64' is not supported"),
    "shape no list": (entry(shape=4096), "shape 4096 is not a list of sizes"),
    "shape negative": (entry(shape=(-64, -64)), r"shape \[-64, -64\] is not a list of sizes"),
    "shape of a million sizes": (
        entry(shape=(2147483647,) * 1_000_000),
        r"shape \[(2147483647, ){8}214\.\.\. is not a list of sizes",
    ),
    "shape beyond MLX": (entry(shape=(2**31, 0), offsets=(0, 0)), r"shape \[2147483648, 0\] is not a list of sizes"),
    "offsets three": (entry(offsets=(0, 1, 2)), r"data_offsets \[0, 1, 2\] are not two positions"),
    "offsets disagree with the shape": (
        entry(offsets=(0, 16380)),
        r"F32 \[64, 64\] needs 16384 bytes, the header gives 16380",
    ),
}

BLOBS: dict[str, Case] = {
    **{
        f"blob {what}": Case(spoil, rf"layer {WEIGHT}: open {_BLOB}: {why}; {_AGAIN}")
        for what, (spoil, why) in _UNOPENED.items()
    },
    **{name: Case(with_data(data), _AT + line) for name, (data, line) in _CONTENTS.items()},
    **{name: Case(with_header(header), _AT + line) for name, (header, line) in _HEADERS.items()},
    **{name: Case(with_header({WEIGHT: of}), _TENSOR_AT + line) for name, (of, line) in _ENTRIES.items()},
    "blob truncated": Case(cut(WEIGHT), rf"{_AT}size mismatch: want (\d+) bytes, found \d+; {_AGAIN}"),
    "blob of gigabytes": Case(
        sparse(WEIGHT, GIGABYTES, struct.pack("<Q", GIGABYTES - 8)),
        rf"{_AT}header of {GIGABYTES - 8} bytes does not fit a file of {GIGABYTES} bytes",
    ),
    "data shorter than announced": Case(
        with_header({WEIGHT: entry()}, 16000),
        rf"{_TENSOR_AT}data ends at byte 16384, the file holds 16000: it is truncated",
    ),
    "tensor in two blobs": Case(
        lambda store: store.put_tensors("another layer", {WEIGHT: zeros("F32", 64, 64)}),
        rf"tensor {WEIGHT} is in two files: {_BLOB} and {_BLOB}",
    ),
}

_PARTS: dict[str, tuple[Break, str]] = {
    "words of int": (with_packed(words=zeros("I32", 64, 8)), r"want packed U32 words with scales, found I32 \[64, 8\]"),
    "scales of int": (with_packed(scale=zeros("I32", 64, 1)), "scales of dtype I32, want U8, F16, BF16 or F32"),
    "scale rows": (with_packed(scale=zeros("F32", 32, 1)), r"want scales \[64, 'groups'\], found \[32, 1\]"),
    "scale columns": (with_packed(scale=zeros("F32", 64, 3)), "8 words and 3 F32 scales a row match no quantization"),
    "quantization biases missing": (with_packed(bias=None), r"want quantization biases F32 \[64, 1\], found none"),
    "quantization biases of another type": (
        with_packed(bias=zeros("F16", 64, 1)),
        r"want quantization biases F32 \[64, 1\], found F16 \[64, 1\]",
    ),
    "byte scales with biases": (
        with_packed(scale=zeros("U8", 64, 4)),
        rf"byte scales \(a floating-point mode\) take no biases, found {WEIGHT}\.bias",
    ),
}
PARTS = {name: Case(spoil, rf"{_BLOB}: tensor {WEIGHT}: {line}") for name, (spoil, line) in _PARTS.items()}

TEXTS: dict[str, Case] = {
    "config.json not in the manifest": Case(
        without("config.json"), r'failed to read config\.json: config "config\.json" not found in manifest'
    ),
    "config.json not json": Case(
        with_text("config.json", b'{"a":'), rf"failed to read config\.json: {_BLOB}: Expecting value: .*"
    ),
    "config.json of gigabytes": Case(
        sparse("config.json", GIGABYTES),
        rf"failed to read config\.json: {_BLOB}: {GIGABYTES} bytes are too many for a text file",
    ),
    "no architecture": Case(
        with_text("config.json", b'{"model_type": "llama"}'), r"no architectures found in config\.json"
    ),
    "architecture unknown": Case(
        with_config(architectures=["FooForCausalLM"], model_type="foo"), "unsupported architecture: FooForCausalLM"
    ),
    "architecture a path": Case(
        with_config(architectures=["Foo"], model_type="..utils"), "unsupported architecture: Foo"
    ),
    "more layers than there are": Case(
        with_config(num_hidden_layers=3), r"config\.json: num_hidden_layers is 3, the model holds 2: layer 2 is missing"
    ),
    "tokenizer not in the manifest": Case(
        without("tokenizer.json"), r'load tokenizer config: config "tokenizer\.json" not found in manifest'
    ),
}

TOKENIZERS: dict[str, Case] = {
    "tokenizer missing": Case(
        without_blob("tokenizer.json"), rf"layer tokenizer\.json: open {_BLOB}: no such file or directory; {_AGAIN}"
    ),
    "tokenizer not json": Case(with_text("tokenizer.json", b"{"), r"parse tokenizer: tokenizer\.json: .*"),
    "tokenizer config not json": Case(
        with_text("tokenizer_config.json", b"{"), r"parse tokenizer: tokenizer_config\.json: .*"
    ),
}
"""Faults found by the tokenizer, which serving opens while the weights are read."""

RENAMED_MODULES: dict[str, Case] = {
    "tensor missing": Case(without(WEIGHT), rf"tiny lacks 1 tensors: {WEIGHT}"),
    "tensors missing": Case(
        each(*(without(f"model.layers.{layer}.self_attn.{part}_proj.weight") for layer in (0, 1) for part in "qkvo")),
        r"tiny lacks 8 tensors: (\S+, ){5}\S+ and 2 more",
    ),
    "tensor unknown": Case(
        lambda store: store.put_tensors("x", {"model.layers.0.surprise.weight": zeros("F32", 2)}),
        r"tiny holds 1 tensors that mlx_lm\.models\.llama does not know: model\.layers\.0\.surprise\.weight",
    ),
    "shape of gigabytes": Case(
        sparse(WEIGHT, len(_LARGE) + GIGABYTES, _LARGE),
        rf"{_BLOB}: tensor {WEIGHT}: want shape \[64, 64\], found \[131072, 131072\]",
    ),
    "integers without scales": Case(
        with_weight(zeros("U32", 64, 64)), rf"{_BLOB}: tensor {WEIGHT}: want a floating-point type, found uint32"
    ),
    "words of another width": Case(
        with_packed(words=zeros("U32", 64, 5)),
        rf"{_BLOB}: tensor {WEIGHT}: 5 packed words and 1 scales a row match no quantization of 64 inputs",
    ),
    "packed rows": Case(
        with_packed(words=zeros("U32", 32, 8), scale=zeros("F32", 32, 1), bias=zeros("F32", 32, 1)),
        rf"{_BLOB}: tensor {WEIGHT}: want shape \[64, 8\], found \[32, 8\]",
    ),
}
"""Faults found when the headers are compared with mlx-lm's module."""

CASES = MANIFESTS | BLOBS | PARTS | TEXTS | TOKENIZERS | RENAMED_MODULES

HARMLESS: dict[str, Break] = {
    "draft blob missing": each(
        lambda store: store.put("draft.model.norm.weight", b"junk", TENSOR), without_blob("draft.model.norm.weight")
    ),
    "no model config": with_manifest(config=None),
    "two layers of one text file": lambda store: with_manifest(
        layers=[*store.layers, store.add_blob(b"{}", JSON, "config.json")]
    )(store),
    "incomplete head for more tokens": lambda store: store.put_tensors("m", {"mtp.norm.weight": zeros("F32", 8)}),
    "null for no metadata": lambda store: with_header({"__metadata__": None, WEIGHT: entry()})(store),
    "metadata that is wrong": lambda store: store.put(
        WEIGHT, safetensors_bytes(store.tensors(WEIGHT), {"quant_type": "int3", "group_size": "banana"}), TENSOR
    ),
    "padding between tensors": with_header({WEIGHT: entry(offsets=(8, 16392))}, 16400),
    "a text file that nobody reads is missing": each(
        with_text("preprocessor_config.json", b"{}"), without_blob("preprocessor_config.json")
    ),
    "digest with a dash": lambda store: with_layer(digest=str(store.layer(WEIGHT)["digest"]).replace(":", "-"))(store),
}
"""Oddities that must not prevent a model from being served."""
