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

from scripts.tools.models.store import CONFIG, JSON, PACKINGS, TENSOR, Store, Tensor, quantize, safetensors_bytes

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
_ROOT = r"/\S+"
_MANIFEST = rf"{_ROOT}/manifests/registry\.ollama\.ai/library/tiny/latest"
_BLOB = rf"{_ROOT}/blobs/sha256-[0-9a-f]{{64}}"
_AT = rf"layer {WEIGHT}: {_BLOB}: "
_TENSOR_AT = rf"{_AT}tensor {WEIGHT}: "
_AGAIN = "pull or create the model again"

Break = Callable[[Store], object]


class Case(NamedTuple):
    """`line` is a regular expression for the whole line. `loads` is true if opening succeeds and only loading fails."""

    spoil: Break
    line: str
    loads: bool = False

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


def moved(of: Callable[[Store], Path]) -> Break:
    """Moves a file elsewhere and leaves a link to it."""

    def apply(store: Store) -> None:
        path = of(store)
        path.rename(store.models_dir / "elsewhere")
        path.symlink_to(store.models_dir / "elsewhere")

    return apply


def write_manifest(text: str) -> Break:
    return lambda store: store.manifest_path.write_text(text)


def as_directory(store: Store) -> None:
    store.manifest_path.unlink()
    store.manifest_path.mkdir()


GONE = f"sha256:{'0' * 64}"
GIGABYTES = 1 << 36  # 64 GiB

_LARGE = file_start({WEIGHT: entry(shape=(1 << 17, 1 << 17), offsets=(0, GIGABYTES))})

MANIFESTS: dict[str, Case] = {
    "manifest missing": Case(
        lambda store: store.manifest_path.unlink(),
        rf"read manifest: open {_MANIFEST}: no such file or directory \(`ollama list` .*, --models-dir another store\)",
    ),
    "manifest a directory": Case(as_directory, rf"read manifest: open {_MANIFEST}: no such file or directory \(.*\)"),
    "manifest not json": Case(write_manifest('{"layers": ['), rf"parse manifest: {_MANIFEST}: Expecting value: .*"),
    "manifest empty": Case(write_manifest(""), rf"parse manifest: {_MANIFEST}: Expecting value: .*"),
    "manifest not utf-8": Case(
        lambda store: store.manifest_path.write_bytes(b'{"layers": "\xff"}'),
        rf"parse manifest: {_MANIFEST}: 'utf-8' .*",
    ),
    "manifest a list": Case(write_manifest("[]"), rf"parse manifest: {_MANIFEST}: want a JSON object, found list"),
    "manifest deep": Case(write_manifest("[" * 100_000), rf"parse manifest: {_MANIFEST}: .*recursion.*"),
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
        with_manifest(layers=[]), rf"model tiny has no tensor layers \(a GGUF model\?\): {_MANIFEST}"
    ),
    "digest out of the store": Case(
        with_layer(digest="sha256:../../../etc/passwd"),
        rf"parse manifest: {_MANIFEST}: invalid digest 'sha256:\.\./\.\./\.\./etc/passwd' of layer '{WEIGHT}'",
    ),
    "digest an absolute path": Case(
        with_layer(digest="/etc/passwd"),
        rf"parse manifest: {_MANIFEST}: invalid digest '/etc/passwd' of layer '{WEIGHT}'",
    ),
    "digest too long": Case(
        with_layer(digest=f"{GONE}0"), rf"parse manifest: {_MANIFEST}: invalid digest '{GONE}0' of layer '{WEIGHT}'"
    ),
    "digest too short": Case(
        with_layer(digest=GONE[:-1]), rf"parse manifest: {_MANIFEST}: invalid digest '{GONE[:-1]}' of layer '{WEIGHT}'"
    ),
    "digest no hexadecimal": Case(
        with_layer(digest=f"{GONE[:-1]}g"),
        rf"parse manifest: {_MANIFEST}: invalid digest '{GONE[:-1]}g' of layer '{WEIGHT}'",
    ),
    "digest of another kind": Case(
        with_layer(digest="sha512:00"), rf"parse manifest: {_MANIFEST}: invalid digest 'sha512:00' of layer '{WEIGHT}'"
    ),
    "digest with a newline": Case(
        with_layer(digest=f"{GONE}\n"),
        rf"parse manifest: {_MANIFEST}: invalid digest '{GONE}\\n' of layer '{WEIGHT}'",
    ),
    "no digest": Case(
        with_layer(digest=None), rf"parse manifest: {_MANIFEST}: invalid digest None of layer '{WEIGHT}'"
    ),
    "digest of a text layer": Case(
        with_layer("tokenizer.json", digest="sha256:.."),
        rf"parse manifest: {_MANIFEST}: invalid digest 'sha256:\.\.' of layer 'tokenizer\.json'",
    ),
    "size no number": Case(
        with_layer(size="12"), rf"parse manifest: {_MANIFEST}: invalid size '12' of layer '{WEIGHT}'"
    ),
    "size negative": Case(with_layer(size=-1), rf"parse manifest: {_MANIFEST}: invalid size -1 of layer '{WEIGHT}'"),
    "format gguf": Case(
        with_model_config({"model_format": "gguf"}),
        r"model tiny has the format 'gguf', want 'safetensors' \(`ollama create --experimental` makes such models\): "
        + _BLOB,
    ),
    "format absent": Case(
        with_model_config({}), rf"model tiny has the format None, want 'safetensors' \(.*\): {_BLOB}"
    ),
    "model config a list": Case(with_model_config([]), rf"model config: {_BLOB}: want a JSON object, found list"),
    "model config not json": Case(with_model_config(b"{"), rf"model config: {_BLOB}: Expecting property name .*"),
    "model config digest": Case(
        with_manifest(config={"digest": "sha256:..", "size": 1, "mediaType": CONFIG}),
        rf"parse manifest: {_MANIFEST}: invalid digest 'sha256:\.\.' of layer '{CONFIG.replace('+', '.')}'",
    ),
    "model config missing": Case(
        with_manifest(config={"digest": GONE, "size": 1}),
        rf"model config: open {_ROOT}/sha256-0{{64}}: no such file or directory; {_AGAIN}",
    ),
}

BLOBS: dict[str, Case] = {
    "blob missing": Case(without_blob(WEIGHT), rf"layer {WEIGHT}: open {_BLOB}: no such file or directory; {_AGAIN}"),
    "blob a directory": Case(replaced(Path.mkdir), rf"layer {WEIGHT}: open {_BLOB}: is a directory; {_AGAIN}"),
    "blob a pipe": Case(replaced(os.mkfifo), rf"layer {WEIGHT}: open {_BLOB}: not a regular file; {_AGAIN}"),
    "blob a device": Case(
        replaced(lambda path: path.symlink_to("/dev/zero")),
        rf"layer {WEIGHT}: open {_BLOB}: not a regular file; {_AGAIN}",
    ),
    "blob a link to nothing": Case(
        replaced(lambda path: path.symlink_to("nowhere")),
        rf"layer {WEIGHT}: open {_BLOB}: no such file or directory; {_AGAIN}",
    ),
    "blob a link to itself": Case(
        replaced(lambda path: path.symlink_to(path)),
        rf"layer {WEIGHT}: open {_BLOB}: too many levels of symbolic links; {_AGAIN}",
    ),
    "blob truncated": Case(cut(WEIGHT), rf"{_AT}size mismatch: want (\d+) bytes, found \d+; {_AGAIN}"),
    "blob longer": Case(
        lambda store: store.blob_of(WEIGHT).write_bytes(store.blob_of(WEIGHT).read_bytes() + b" "),
        rf"{_AT}size mismatch: want \d+ bytes, found \d+; {_AGAIN}",
    ),
    "blob empty": Case(
        lambda store: store.put(WEIGHT, b"", TENSOR),
        rf"{_AT}not a safetensors file: 0 bytes are too few for a header",
    ),
    "blob of seven bytes": Case(
        lambda store: store.put(WEIGHT, b"1234567", TENSOR),
        rf"{_AT}not a safetensors file: 7 bytes are too few for a header",
    ),
    "blob of another format": Case(
        lambda store: store.put(WEIGHT, b"GGUF" + bytes(100), TENSOR),
        rf"{_AT}header of \d+ bytes does not fit a file of 104 bytes",
    ),
    "blob of gigabytes": Case(
        sparse(WEIGHT, GIGABYTES, struct.pack("<Q", GIGABYTES - 8)),
        rf"{_AT}header of {GIGABYTES - 8} bytes does not fit a file of {GIGABYTES} bytes",
    ),
    "header longer than the file": Case(
        lambda store: store.put(WEIGHT, struct.pack("<Q", 2**63) + b"{}", TENSOR),
        rf"{_AT}header of {2**63} bytes does not fit a file of 10 bytes",
    ),
    "header not json": Case(with_header(b"{nonsense"), rf"{_AT}the header is not JSON: Expecting property name .*"),
    "header not utf-8": Case(with_header(b'{"\xff\xfe": 1}'), rf"{_AT}the header is not JSON: 'utf-8' .*"),
    "header deep": Case(with_header(b"[" * 100_000), rf"{_AT}the header is not JSON: .*recursion.*"),
    "header a list": Case(with_header([]), rf"{_AT}the header is not a JSON object"),
    "key twice in a header": Case(with_header(b'{"a": 1, "a": 2}'), rf"{_AT}the header names a tensor twice"),
    "entry no object": Case(with_header({WEIGHT: 1}), rf"{_TENSOR_AT}the header entry is not an object"),
    "dtype unknown": Case(with_header({WEIGHT: entry("F64", (32, 64))}), rf"{_TENSOR_AT}dtype 'F64' is not supported"),
    "dtype no text": Case(with_header({WEIGHT: {**entry(), "dtype": 7}}), rf"{_TENSOR_AT}dtype 7 is not supported"),
    "shape no list": Case(with_header({WEIGHT: entry(shape=4096)}), rf"{_TENSOR_AT}shape 4096 is not a list of sizes"),
    "shape negative": Case(
        with_header({WEIGHT: entry(shape=(-64, -64))}), rf"{_TENSOR_AT}shape \[-64, -64\] is not a list of sizes"
    ),
    "shape of a million sizes": Case(
        with_header({WEIGHT: entry(shape=(2147483647,) * 1_000_000)}),
        rf"{_TENSOR_AT}shape \[(2147483647, ){{8}}214\.\.\. is not a list of sizes",
    ),
    "shape of floats": Case(
        with_header({WEIGHT: entry(shape=(64.0, 64))}), rf"{_TENSOR_AT}shape \[64\.0, 64\] is not a list of sizes"
    ),
    "shape beyond MLX": Case(
        with_header({WEIGHT: entry(shape=(2**31, 0), offsets=(0, 0))}),
        rf"{_TENSOR_AT}shape \[2147483648, 0\] is not a list of sizes",
    ),
    "offsets three": Case(
        with_header({WEIGHT: entry(offsets=(0, 1, 2))}), rf"{_TENSOR_AT}data_offsets \[0, 1, 2\] are not two positions"
    ),
    "offsets disagree with the shape": Case(
        with_header({WEIGHT: entry(offsets=(0, 16380))}),
        rf"{_TENSOR_AT}F32 \[64, 64\] needs 16384 bytes, the header gives 16380",
    ),
    "offsets backwards": Case(
        with_header({WEIGHT: entry(offsets=(16384, 0))}),
        rf"{_TENSOR_AT}F32 \[64, 64\] needs 16384 bytes, the header gives -16384",
    ),
    "data shorter than announced": Case(
        with_header({WEIGHT: entry()}, 16000),
        rf"{_TENSOR_AT}data ends at byte 16384, the file holds 16000: it is truncated",
    ),
    "tensors overlap": Case(
        with_header({WEIGHT: entry(), "other": entry(shape=(16, 64), offsets=(4096, 8192))}),
        rf"{_AT}tensors {WEIGHT} and other overlap",
    ),
    "layout of before 0.16": Case(
        with_header({"data": entry()}), rf"{_AT}stored by Ollama before 0\.16; create or pull the model again"
    ),
    "tensor in two blobs": Case(
        lambda store: store.put_tensors("another layer", {WEIGHT: zeros("F32", 64, 64)}),
        rf"tensor {WEIGHT} is in two files: {_BLOB} and {_BLOB}",
    ),
}

PARTS: dict[str, Case] = {
    "words of int": Case(
        with_packed(words=zeros("I32", 64, 8)),
        rf"{_BLOB}: tensor {WEIGHT}: want packed U32 words with scales, found I32 \[64, 8\]",
    ),
    "scales of int": Case(
        with_packed(scale=zeros("I32", 64, 1)),
        rf"{_BLOB}: tensor {WEIGHT}: scales of dtype I32, want U8, F16, BF16 or F32",
    ),
    "scale rows": Case(
        with_packed(scale=zeros("F32", 32, 1)),
        rf"{_BLOB}: tensor {WEIGHT}: want scales \[64, 'groups'\], found \[32, 1\]",
    ),
    "scale columns": Case(
        with_packed(scale=zeros("F32", 64, 3)),
        rf"{_BLOB}: tensor {WEIGHT}: 8 words and 3 F32 scales a row match no quantization",
    ),
    "quantization biases missing": Case(
        with_packed(bias=None),
        rf"{_BLOB}: tensor {WEIGHT}: want quantization biases F32 \[64, 1\], found none",
    ),
    "quantization biases of another shape": Case(
        with_packed(bias=zeros("F32", 64, 2)),
        rf"{_BLOB}: tensor {WEIGHT}: want quantization biases F32 \[64, 1\], found F32 \[64, 2\]",
    ),
    "quantization biases of another type": Case(
        with_packed(bias=zeros("F16", 64, 1)),
        rf"{_BLOB}: tensor {WEIGHT}: want quantization biases F32 \[64, 1\], found F16 \[64, 1\]",
    ),
    "byte scales with biases": Case(
        with_packed(scale=zeros("U8", 64, 4)),
        rf"{_BLOB}: tensor {WEIGHT}: byte scales \(a floating-point mode\) take no biases, found {WEIGHT}\.bias",
    ),
}

TEXTS: dict[str, Case] = {
    "config.json not in the manifest": Case(
        without("config.json"), r'failed to read config\.json: config "config\.json" not found in manifest'
    ),
    "config.json not json": Case(
        with_text("config.json", b'{"a":'), rf"failed to read config\.json: {_BLOB}: Expecting value: .*"
    ),
    "config.json a list": Case(
        with_text("config.json", b"[1]"), r"failed to read config\.json: want an object, found list"
    ),
    "config.json missing": Case(
        without_blob("config.json"),
        rf"failed to read config\.json: open {_BLOB}: no such file or directory; {_AGAIN}",
    ),
    "config.json truncated": Case(
        cut("config.json"),
        rf"failed to read config\.json: {_BLOB}: size mismatch: want \d+ bytes, found \d+; {_AGAIN}",
    ),
    "config.json of gigabytes": Case(
        sparse("config.json", GIGABYTES),
        rf"failed to read config\.json: {_BLOB}: {GIGABYTES} bytes are too many for a text file",
    ),
    "no architecture": Case(
        with_text("config.json", b'{"model_type": "llama"}'), r"no architectures found in config\.json"
    ),
    "architectures empty": Case(
        with_text("config.json", b'{"architectures": []}'), r"no architectures found in config\.json"
    ),
    "architecture unknown": Case(
        with_config(architectures=["FooForCausalLM"], model_type="foo"), "unsupported architecture: FooForCausalLM"
    ),
    "architecture a path": Case(
        with_config(architectures=["Foo"], model_type="..utils"), "unsupported architecture: Foo"
    ),
    "heads do not divide": Case(
        with_config(num_attention_heads=5, head_dim=None),
        r"config\.json: hidden_size \(64\) must be divisible by num_attention_heads \(5\)",
    ),
    "hidden size zero": Case(with_config(hidden_size=0), r"config\.json: invalid hidden_size: 0"),
    "more layers than there are": Case(
        with_config(num_hidden_layers=3),
        r"config\.json: num_hidden_layers is 3, the model holds 2: layer 2 is missing",
    ),
    "tokenizer not in the manifest": Case(
        without("tokenizer.json"), r'load tokenizer config: config "tokenizer\.json" not found in manifest'
    ),
}

TOKENIZERS: dict[str, Case] = {
    "tokenizer missing": Case(
        without_blob("tokenizer.json"), rf"layer tokenizer\.json: open {_BLOB}: no such file or directory; {_AGAIN}"
    ),
    "tokenizer truncated": Case(
        cut("tokenizer.json"), rf"layer tokenizer\.json: {_BLOB}: size mismatch: want \d+ bytes, found \d+; {_AGAIN}"
    ),
    "tokenizer not json": Case(with_text("tokenizer.json", b"{"), r"parse tokenizer: tokenizer\.json: .*"),
    "tokenizer config not json": Case(
        with_text("tokenizer_config.json", b"{"), r"parse tokenizer: tokenizer_config\.json: .*"
    ),
}
"""Faults found by the tokenizer, which serving opens while the weights are read."""

RENAMED_MODULES: dict[str, Case] = {
    "tensor missing": Case(without(WEIGHT), rf"tiny lacks 1 tensors: {WEIGHT}", loads=True),
    "tensors missing": Case(
        each(*(without(f"model.layers.{layer}.self_attn.{part}_proj.weight") for layer in (0, 1) for part in "qkvo")),
        r"tiny lacks 8 tensors: (\S+, ){5}\S+ and 2 more",
        loads=True,
    ),
    "tensor unknown": Case(
        lambda store: store.put_tensors("x", {"model.layers.0.surprise.weight": zeros("F32", 2)}),
        r"tiny holds 1 tensors that mlx_lm\.models\.llama does not know: model\.layers\.0\.surprise\.weight",
        loads=True,
    ),
    "shape": Case(
        with_weight(zeros("F32", 32, 64)),
        rf"{_BLOB}: tensor {WEIGHT}: want shape \[64, 64\], found \[32, 64\]",
        loads=True,
    ),
    "shape of gigabytes": Case(
        sparse(WEIGHT, len(_LARGE) + GIGABYTES, _LARGE),
        rf"{_BLOB}: tensor {WEIGHT}: want shape \[64, 64\], found \[131072, 131072\]",
        loads=True,
    ),
    "integers without scales": Case(
        with_weight(zeros("U32", 64, 64)),
        rf"{_BLOB}: tensor {WEIGHT}: want a floating-point type, found uint32",
        loads=True,
    ),
    "words of another width": Case(
        with_packed(words=zeros("U32", 64, 5)),
        rf"{_BLOB}: tensor {WEIGHT}: 5 packed words and 1 scales a row match no quantization of 64 inputs",
        loads=True,
    ),
    "packed rows": Case(
        with_packed(words=zeros("U32", 32, 8), scale=zeros("F32", 32, 1), bias=zeros("F32", 32, 1)),
        rf"{_BLOB}: tensor {WEIGHT}: want shape \[64, 8\], found \[32, 8\]",
        loads=True,
    ),
}
"""Faults found when the headers are compared with mlx-lm's module."""

CASES = MANIFESTS | BLOBS | PARTS | TEXTS | TOKENIZERS | RENAMED_MODULES

KNOWN_FROM_OLLAMA = {
    "no architecture": "no architectures found in config.json",
    "architecture unknown": "unsupported architecture: FooForCausalLM",
    "config.json not in the manifest": 'failed to read config.json: config "config.json" not found in manifest',
    "tokenizer not in the manifest": 'load tokenizer config: config "tokenizer.json" not found in manifest',
}
"""Lines identical to those of Ollama's runner, word for word."""

HARMLESS: dict[str, Break] = {
    "draft blob missing": each(
        lambda store: store.put("draft.model.norm.weight", b"junk", TENSOR), without_blob("draft.model.norm.weight")
    ),
    "draft of an unknown architecture": lambda store: store.put_json("draft/config.json", {"architectures": ["X"]}),
    "no model config": with_manifest(config=None),
    "two layers of one text file": lambda store: with_manifest(
        layers=[*store.layers, store.add_blob(b"{}", JSON, "config.json")]
    )(store),
    "one blob in two layers": lambda store: with_manifest(layers=[*store.layers, store.layer(WEIGHT)])(store),
    "vision config without a tower": with_config(vision_config={"hidden_size": 8}),
    "vision tower without a config": lambda store: store.put_tensors(
        "v", {"vision_tower.patch_embed.weight": zeros("F32", 8, 8)}
    ),
    "incomplete head for more tokens": lambda store: store.put_tensors("m", {"mtp.norm.weight": zeros("F32", 8)}),
    "null for no metadata": lambda store: with_header({"__metadata__": None, WEIGHT: entry()})(store),
    "metadata that is wrong": lambda store: store.put(
        WEIGHT,
        safetensors_bytes(store.tensors(WEIGHT), {"quant_type": "int3", "group_size": "banana"}),
        TENSOR,
    ),
    "padding between tensors": with_header({WEIGHT: entry(offsets=(8, 16392))}, 16400),
    "a layer of a kind from the future": lambda store: with_manifest(
        layers=[*store.layers, store.add_blob(b"?", "application/vnd.ollama.image.dream", "x")]
    )(store),
    "a text file that nobody reads is missing": each(
        with_text("preprocessor_config.json", b"{}"), without_blob("preprocessor_config.json")
    ),
    "digest with a dash": lambda store: with_layer(digest=str(store.layer(WEIGHT)["digest"]).replace(":", "-"))(store),
    "blob a link": moved(lambda store: store.blob_of(WEIGHT)),
    "manifest a link": moved(lambda store: store.manifest_path),
}
"""Oddities that must not prevent a model from being served."""
