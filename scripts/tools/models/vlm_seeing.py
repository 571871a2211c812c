"""Tiny models of mlx-vlm that see, as directories: a config, weights, a tokenizer with its special tokens, and the
files of its processor. `vlm.toml` has their tables, `see-PACKAGE`."""

import json
import string
from pathlib import Path
from typing import Any, cast

from runner.model.weights.parameters import parameters_of
from scripts.tools.models import data, vlm
from scripts.tools.models.checkpoints import SPECIAL_TOKENS, write_weights
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level, fallback_byte, sentencepiece, written_model

Values = dict[str, Any]
_TABLES = data.read("vlm")
_TEXT = ("vocab_size", "vocabulary_size")
_SOFT = ("image_token_id", "image_token_index", "image_token", "media_placeholder_token_id", "img_context_token_id")
_VIDEO = ("video_token_id", "video_token_index")
_START = ("vision_start_token_id", "image_start_token_id", "boi_token_index")
_END = ("vision_end_token_id", "image_end_token_id", "eoi_token_index")


def table(package: str) -> Values:
    """Returns the row of a package that sees. Raises KeyError if it has none."""
    return cast("Values", _TABLES[f"see-{package}"])


def config(package: str) -> Values:
    """The tiny `config.json` of a package, with the tokens that stand for pictures."""
    see, plain = table(package), vlm.config(package)
    ids = {name: each["id"] for each in _tokenizer(see)["added_tokens"] for name in [each["content"]]}
    fields: Values = dict.fromkeys(_TEXT, _rounded(max(ids.values()) + 1))
    fields |= dict.fromkeys(_SOFT, ids[see["soft"]])
    fields |= {name: ids[see[key]] for key, names in (("start", _START), ("end", _END)) if key in see for name in names}
    fields |= dict.fromkeys(_VIDEO, ids[see["soft"]] + 3 if "start" in see else _rounded(0) + 1)
    named = {field: ids[token] for field, token in see.get("ids", {}).items()}
    return {**_replaced(plain, fields), **named, **see.get("config", {}), "architectures": [f"{package}X"]}


def write(package: str, directory: Path) -> Path:
    """Writes a model, the same weights every time, and returns its directory."""
    see, chosen = table(package), config(package)
    directory.mkdir(parents=True)
    write_weights(directory, parameters_of(vlm.filled(package, chosen)))
    tokens = {"bos_token": see.get("bos", "<|bos|>"), "eos_token": "<|eos|>", "pad_token": "<|eos|>"}
    files: Values = {
        "config": chosen,
        "tokenizer": _tokenizer(see),
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "extra_special_tokens": see.get("tokenizer", {}),
            **tokens,
        },
        "preprocessor_config": see.get("preprocessor", {}),
        "processor_config": see.get("processor", {}),
    }
    if see.get("sentencepiece"):
        del files["tokenizer"]
        (directory / "tokenizer.model").write_bytes(_sentencepiece(see))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def _sentencepiece(see: Values) -> bytes:
    """Returns the same vocabulary as a `tokenizer.model`."""
    pieces = [(fallback_byte(value), "byte") for value in range(len(ALL_BYTES))]
    return written_model([*pieces, *((token, "user-defined") for token in _tokens(see)), ("<unk>", "unknown")])


def _tokens(see: Values) -> list[str]:
    return [*SPECIAL_TOKENS, *see.get("tokens", [see["soft"]])]


def _tokenizer(see: Values) -> Values:
    if see.get("prefix"):
        return sentencepiece([" ", *string.ascii_lowercase], _tokens(see), prepend_space=True)
    return byte_level([*ALL_BYTES, *_filling(see)], _tokens(see), merge=False)


def _filling(see: Values) -> list[bytes]:
    """Returns tokens that nothing becomes, before the special ones of a processor that knows an id by heart."""
    return [index.to_bytes(4, "big") for index in range(see.get("first", 256) - len(ALL_BYTES))]


def _rounded(count: int) -> int:
    return -(-count // 32) * 32


def _replaced(value: Values, fields: Values) -> Values:
    """Returns a config with these fields replaced, wherever it has them."""
    return {
        key: _replaced(each, fields) if isinstance(each, dict) else fields.get(key, each) for key, each in value.items()
    }
