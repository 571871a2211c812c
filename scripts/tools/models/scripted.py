"""Writes a llama whose next token is a known function of the last one.

Attention and MLP are zero, so the residual stream carries the last token's embedding untouched. That embedding is
one-hot apart from a few filler columns which make the mean of its squares exactly 1: the final RMSNorm then changes
nothing, and column t of the output head, divided by the one-hot value (a power of two), *is* the row of logits after
token t, to the last bit. Greedy answers are chains that a test writes down; sampling cases get exact logits.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from scripts.tools.models.tensors import Tensor, safetensors_bytes
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level, model_of_bytes, sentencepiece_bytes, write_tokenizer

BYTES = ALL_BYTES
"""The first part of every vocabulary: id n is byte n, so any prompt tokenizes to one token per byte."""

BACKGROUND = -100.0
"""The logit of every token that a transition does not name: never drawn, yet finite in a log-softmax."""

Transition = int | Mapping[int, float]
Alphabet = Literal["byte-level", "sentencepiece", "tokenizer.model"]

_ONE_HOT = 8
_HEAD_DIM = 64
_SMALL_HEAD_DIM = 8
_INTERMEDIATE = 8


def write_scripted(
    directory: Path,
    vocabulary: Sequence[bytes],
    transitions: Mapping[int, Transition],
    eos: Sequence[int],
    special: Mapping[int, str] | None = None,
    *,
    default: Transition | None = None,
    context_length: int = 65536,
    bos: int | None = None,
    add_bos: bool = False,
    alphabet: Alphabet = "byte-level",
    small_head: bool = False,
    key_heads: int = 1,
) -> Path:
    """Writes config, tokenizer and weights of a scripted llama into `directory` (made if need be) and returns it.

    `vocabulary[i]` is the byte string of id i and starts with `BYTES`; longer ones are only ever generated, as there
    are no merges. `special` maps the ids that follow to added tokens. `transitions[t]` is the token after t (logit 0,
    everything else `BACKGROUND`) or the logits by id; tokens without one go to `default`, or else to the first EOS.
    `alphabet` is how tokenizer.json spells the bytes; sentencepiece spells a space "▁" and lone bytes "<0xNN>", and
    "tokenizer.model" stands for that file in the place of tokenizer.json, with one id more than the model has.
    `small_head` makes keys and values an eighth as large, by one head of a size that not every runner knows; else there
    are `key_heads` heads of keys and values.
    """
    special = dict(sorted((special or {}).items()))
    if tuple(vocabulary[:256]) != BYTES or len(set(vocabulary)) != len(vocabulary):
        raise ValueError("a vocabulary starts with the 256 bytes in order and has no token twice")
    if list(special) != list(range(len(vocabulary), len(vocabulary) + len(special))):
        raise ValueError("special tokens take the ids after the vocabulary")
    otherwise = default if default is not None else eos[0]
    size = len(vocabulary) + len(special)
    logits = np.full((size, size), BACKGROUND, np.float32)
    for token in range(size):
        following = transitions.get(token, otherwise)
        for successor, logit in ({following: 0.0} if isinstance(following, int) else following).items():
            logits[token, successor] = logit

    directory.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(logits, _SMALL_HEAD_DIM if small_head else None, key_heads)
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors, {"format": "pt"}))
    hidden = tensors["model.norm.weight"].shape[0]
    ids: dict[str, object] = {"eos_token_id": list(eos) if len(eos) != 1 else eos[0]}
    if bos is not None:
        ids["bos_token_id"] = bos
    config = _config(size, hidden, context_length, key_heads, small_head=small_head)
    _write_json(directory / "config.json", config | ids)
    _write_json(directory / "generation_config.json", ids)
    _write_json(directory / "tokenizer_config.json", {"add_bos_token": add_bos, "tokenizer_class": "TokenizersBackend"})
    texts = list(special.values())
    if alphabet == "byte-level":
        write_tokenizer(directory, byte_level(vocabulary, texts, merge=False))
    elif alphabet == "sentencepiece":
        write_tokenizer(directory, sentencepiece_bytes(vocabulary, texts))
    else:
        (directory / "tokenizer.model").write_bytes(model_of_bytes(vocabulary, texts))
    return directory


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


def _config(size: int, hidden: int, context_length: int, key_heads: int, *, small_head: bool) -> dict[str, object]:
    # Not every runner knows heads of another size than the width of the model over their number.
    heads = (
        {"num_attention_heads": 1, "head_dim": _SMALL_HEAD_DIM}
        if small_head
        else {"num_attention_heads": hidden // _HEAD_DIM}
    )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": hidden,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": 1,
        **heads,
        "num_key_value_heads": key_heads,
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-30,  # vanishes beside a mean square of 1
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def _filler(total: int) -> list[int]:
    """Whole numbers whose squares sum to `total`, found greedily: a handful, whatever the total."""
    parts = []
    while total:
        parts.append(math.isqrt(total))
        total -= parts[-1] ** 2
    return parts


def _tensors(
    logits: "np.ndarray[tuple[int, int], np.dtype[np.float32]]", only_head: int | None, key_heads: int
) -> dict[str, Tensor]:
    """`only_head`: the size of the one head; None for as many as the model is wide."""
    size = len(logits)
    hidden = 512
    while len(_filler(hidden - _ONE_HOT**2)) + size > hidden:
        hidden *= 2
    filler = _filler(hidden - _ONE_HOT**2)
    embedding = np.zeros((size, hidden), np.float32)
    embedding[np.arange(size), np.arange(size)] = _ONE_HOT
    embedding[:, hidden - len(filler) :] = filler
    head = np.zeros((size, hidden), np.float32)
    head[:, :size] = logits.T / _ONE_HOT
    layer = "model.layers.0"
    queries, keys = only_head or hidden, only_head or key_heads * _HEAD_DIM
    arrays = {
        "lm_head.weight": head,
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(hidden, np.float32),
        f"{layer}.input_layernorm.weight": np.ones(hidden, np.float32),
        f"{layer}.post_attention_layernorm.weight": np.ones(hidden, np.float32),
        f"{layer}.self_attn.q_proj.weight": np.zeros((queries, hidden), np.float32),
        f"{layer}.self_attn.o_proj.weight": np.zeros((hidden, queries), np.float32),
        f"{layer}.mlp.down_proj.weight": np.zeros((hidden, _INTERMEDIATE), np.float32),
    }
    for name in ("k_proj", "v_proj"):
        arrays[f"{layer}.self_attn.{name}.weight"] = np.zeros((keys, hidden), np.float32)
    for name in ("gate_proj", "up_proj"):
        arrays[f"{layer}.mlp.{name}.weight"] = np.zeros((_INTERMEDIATE, hidden), np.float32)
    return {name: Tensor("F32", array.shape, array.tobytes()) for name, array in arrays.items()}
