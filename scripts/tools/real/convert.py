"""Converts a GGUF file of a Llama into a directory of Hugging Face's form: safetensors, configuration, tokenizer."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from runner.model.packing import WORD_BITS

GROUP_SIZE = 32
"""Weights that share a scale and a bias, in every block format of GGML."""
_CONTROL = 3  # the type of a special token
_EMBEDDING = "model.embed_tokens"
_NAMES = {
    "token_embd": _EMBEDDING,
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Weights = dict[str, mx.array]
Metadata = Mapping[str, Any]  # strings, lists of strings, and arrays of MLX


def convert(gguf: Path, directory: Path, *, packed: bool) -> None:
    """Writes the model into this directory, which exists. Packed weights keep their bits; others become float16."""
    loaded = mx.load(str(gguf), return_metadata=True)
    assert isinstance(loaded, tuple)
    tensors, metadata = loaded
    assert isinstance(tensors, dict)
    weights = _rename(tensors, metadata)
    bits = {name.removesuffix(".scales"): _bits(weights, name) for name in weights if name.endswith(".scales")}
    if not packed:
        weights = _unpack(weights, bits)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    files = {
        "config.json": _config(metadata, bits if packed else {}),
        "generation_config.json": {"eos_token_id": _number(metadata, "tokenizer.ggml.eos_token_id")},
        "tokenizer_config.json": _tokenizer_config(metadata),
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    (directory / "tokenizer.json").write_text(_tokenizer(metadata).to_str())


def _rename(tensors: Weights, metadata: Metadata) -> Weights:
    """Returns the tensors under Hugging Face's names, rows of queries and keys in its rotary order."""
    weights = {}
    for name, tensor in tensors.items():
        block, part, kind = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(\w+)", name).groups()  # type: ignore[union-attr]
        layer = f"model.layers.{block}." if block else ""
        if part in ("attn_q", "attn_k"):
            heads = _number(metadata, f"llama.attention.head_count{'_kv' if part == 'attn_k' else ''}")
            tensor = _half_split(tensor, heads)
        if "norm" in part:
            tensor = tensor.astype(mx.float16)
        weights[f"{layer}{_NAMES[part]}.{kind}"] = tensor
    return weights


def _half_split(rows: mx.array, heads: int) -> mx.array:
    """Reorders the rows [H * D, N] of each head from pairs (GGML) to halves (Hugging Face)."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _bits(weights: Weights, scales: str) -> int:
    """Returns the bits of one weight of a packed matrix, given the name of its scales."""
    words = weights[scales.removesuffix("scales") + "weight"].shape[1]
    return WORD_BITS * words // (weights[scales].shape[1] * GROUP_SIZE)


def _unpack(weights: Weights, bits: Mapping[str, int]) -> Weights:
    unpacked = {}
    for name, tensor in weights.items():
        module, kind = name.rsplit(".", 1)
        if kind == "weight":
            if module in bits:
                scales, biases = weights[f"{module}.scales"], weights[f"{module}.biases"]
                tensor = mx.dequantize(tensor, scales, biases, GROUP_SIZE, bits[module])
            unpacked[name] = tensor.astype(mx.float16)
    return unpacked


def _config(metadata: Metadata, bits: Mapping[str, int]) -> dict[str, object]:
    """Returns `config.json`. `bits` are those of packed modules; the most frequent width is the model's."""
    heads = _number(metadata, "llama.attention.head_count")
    hidden = _number(metadata, "llama.embedding_length")
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": _number(metadata, "llama.block_count"),
        "intermediate_size": _number(metadata, "llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _number(metadata, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "rms_norm_eps": round(float(metadata["llama.attention.layer_norm_rms_epsilon"].item()), 9),
        "vocab_size": _number(metadata, "llama.vocab_size"),
        "max_position_embeddings": _number(metadata, "llama.context_length"),
        "rope_theta": float(metadata["llama.rope.freq_base"].item()),
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "eos_token_id": _number(metadata, "tokenizer.ggml.eos_token_id"),
    }
    if bits:
        widths = list(bits.values())
        usual = max(set(widths), key=widths.count)
        quantization: dict[str, object] = {"group_size": GROUP_SIZE, "bits": usual}
        for module, width in bits.items():
            if width != usual:
                quantization[module] = {"group_size": GROUP_SIZE, "bits": width}
        config["quantization"] = quantization
    return config


def _tokenizer(metadata: Metadata) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    types = metadata["tokenizer.ggml.token_type"].tolist()
    tokenizer = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, merges))
    # What llama.cpp calls the pre-tokenizer "smollm": digits alone, then the words of GPT-2.
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = ByteLevelDecoder()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _tokenizer_config(metadata: Metadata) -> dict[str, object]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[_number(metadata, "tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[_number(metadata, "tokenizer.ggml.eos_token_id")],
        "pad_token": tokens[_number(metadata, "tokenizer.ggml.padding_token_id")],
        "model_max_length": _number(metadata, "llama.context_length"),
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _number(metadata: Metadata, name: str) -> int:
    return int(metadata[name].item())
