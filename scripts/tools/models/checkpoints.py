"""Writes tiny random-weight models as Hugging Face style directories: one per family we map, one per cache kind.

Weights are made by mlx-lm's own module from a seed, so a directory always loads, and equal arguments give equal bytes
of every tensor. Norms and biases are noisy, so that a tensor in the wrong place changes the logits.
"""

import copy
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast, get_args

import mlx.core as mx
from mlx.utils import tree_flatten

import runner.process.lean_mlx_lm  # noqa: F401  # registers mlx_lm without its __init__
from scripts.tools.models import data
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level, vocabulary_size, write_tokenizer

Kind = Literal[
    "llama", "qwen3", "gemma3_text", "gemma3",
    "mamba2", "qwen3_next", "falcon_h1", "deepseek_v3", "llama4", "deepseek_v41",
]  # fmt: skip
Dtype = Literal["float32", "bfloat16", "float16"]

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>")
_WORDS = (b"he", b"th", b"the", b" t", b" the", b"in", b"ing", b"er", b" a", b"an", b"and", b" and", b"on", b"re")
TOKENIZER = byte_level([*ALL_BYTES, *_WORDS], SPECIAL_TOKENS)
"""Every byte, a few words, then `SPECIAL_TOKENS`."""

VOCABULARY_SIZE = vocabulary_size(TOKENIZER)
BOS, EOS = (VOCABULARY_SIZE - len(SPECIAL_TOKENS) + index for index in range(2))
GEMMA_WINDOW = 32
"""Sliding window of the Gemma 3 models, in tokens."""
CHUNK = 32
"""Attention chunk of the Llama 4 model, in tokens."""

TABLES = data.read("configs", VOCABULARY_SIZE=VOCABULARY_SIZE, BOS=BOS, EOS=EOS)
"""The configs of `configs.toml`, by name."""
COMMON = TABLES["common"]
"""The config of a small decoder."""
CONFIGS: dict[Kind, dict[str, object]] = {kind: TABLES[kind] for kind in get_args(Kind)}

CACHE_KINDS: tuple[Kind, ...] = (
    "llama", "gemma3_text", "mamba2", "qwen3_next", "falcon_h1", "deepseek_v3", "llama4", "deepseek_v41",
)  # fmt: skip
"""One model per kind of layer cache: plain, rotating, arrays, hybrid, lists, latent attention, chunked, unknown."""


def config_of(kind: Kind, overrides: Mapping[str, object] | None = None) -> dict[str, object]:
    """A fresh `config.json` of that kind, with the end-of-sequence id, changed by `overrides` (None deletes a key)."""
    config = copy.deepcopy(CONFIGS[kind])
    config |= {"bos_token_id": BOS, "eos_token_id": EOS}
    for key, value in (overrides or {}).items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    return config


def _with_tagged_floats(value: object) -> object:
    """transformers writes non-finite numbers as objects; the module needs numbers."""
    if isinstance(value, dict):
        return (
            float("inf")
            if value == {"__float__": "Infinity"}
            else {k: _with_tagged_floats(v) for k, v in value.items()}
        )
    return [_with_tagged_floats(item) for item in value] if isinstance(value, list) else value


def make_weights(config: Mapping[str, object], seed: int, dtype: Dtype) -> dict[str, mx.array]:
    """Random parameters of the mlx-lm module that `config["model_type"]` names, under mlx-lm's names."""
    classes = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    module = classes.Model(classes.ModelArgs.from_dict(_with_tagged_floats(copy.deepcopy(dict(config)))))
    weights = {}
    for name, array in cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters())):
        flat = array.ndim == 1 or (array == array.flatten()[0]).all()
        noisy = array + 0.1 * mx.random.normal(array.shape) if flat else array
        weights[name] = noisy.astype(getattr(mx, dtype)) if mx.issubdtype(array.dtype, mx.floating) else array
    mx.eval(weights)
    return weights


def write_checkpoint(
    directory: Path,
    kind: Kind,
    *,
    seed: int = 0,
    dtype: Dtype = "float32",
    overrides: Mapping[str, object] | None = None,
    shards: int = 1,
) -> Path:
    """Writes config, weights and tokenizer into `directory` (made if absent) and returns it.

    `overrides` change top-level config entries before the weights are made. Experts run on the CPU in float32 only, so
    leave `dtype` for models that have them. `shards` > 1 writes `model-00001-of-..` files and their index.
    """
    config = config_of(kind, overrides)
    config["torch_dtype"] = dtype
    return write_directory(directory, config, make_weights(config, seed, dtype), shards)


def write_directory(
    directory: Path, config: Mapping[str, object], weights: Mapping[str, mx.array], shards: int = 1
) -> Path:
    """Writes a model with `TOKENIZER` into `directory` (made if absent) and returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": [EOS]}))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|eos|>"})
    )
    write_tokenizer(directory, TOKENIZER)
    write_weights(directory, weights, shards)
    return directory


def write_weights(directory: Path, weights: Mapping[str, mx.array], shards: int = 1) -> None:
    """Writes `weights` as `model.safetensors`, or as `shards` files with an index."""
    if shards == 1:
        mx.save_safetensors(str(directory / "model.safetensors"), dict(weights), {"format": "mlx"})
        return
    names = sorted(weights)
    places: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[number::shards]}
        mx.save_safetensors(str(directory / file), part, {"format": "mlx"})
        places |= dict.fromkeys(part, file)
    total = sum(array.nbytes for array in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
