"""The conversion of GGUF: a tiny Llama, written as llama.cpp writes one, computes what it did before."""

from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from runner.model import OpenedModel, open_model
from runner.model.weights.loading import load
from runner.tokenizer import open_tokenizer
from scripts.tools.models.architectures import make_module
from scripts.tools.real.convert import convert

HEADS, KEY_HEADS = 4, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcĠ123", "ab", "Ġa"]
MERGES = ["a b", "Ġ a"]
GGML = {
    "embed_tokens": "token_embd", "norm": "output_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
    "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


def number(value: int) -> mx.array:
    return mx.array(value, mx.uint32)


@pytest.fixture
def module() -> object:
    """A Llama of two layers with tied embeddings, in numbers that float16 holds exactly."""
    from mlx_lm.models.llama import Model, ModelArgs

    assert make_module("llama") is not None  # registers mlx_lm without its __init__
    fields = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "rms_norm_eps": 1e-5,
        "vocab_size": len(TOKENS),
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
    }
    model = Model(ModelArgs.from_dict(fields))
    mx.random.seed(0)
    model.set_dtype(mx.float16)
    model.set_dtype(mx.float32)
    return model


def write_gguf(module: object, file: Path) -> None:
    """Writes rows of queries and keys in pairs, as GGML turns them, and the metadata of a SmolLM2."""
    arrays = {}
    for name, array in cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters())):  # type: ignore[attr-defined]
        *path, part, kind = name.split(".")
        block = f"blk.{path[2]}." if "layers" in path else ""
        heads = {"q_proj": HEADS, "k_proj": KEY_HEADS}.get(part)
        if heads is not None:
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        arrays[f"{block}{GGML[part]}.{kind}"] = array if "norm" in part else array.astype(mx.float16)
    metadata: dict[str, mx.array | str | list[str]] = {
        "general.architecture": "llama",
        "llama.embedding_length": number(32),
        "llama.block_count": number(2),
        "llama.feed_forward_length": number(64),
        "llama.attention.head_count": number(HEADS),
        "llama.attention.head_count_kv": number(KEY_HEADS),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5, mx.float32),
        "llama.context_length": number(64),
        "llama.vocab_size": number(len(TOKENS)),
        "llama.rope.freq_base": mx.array(100_000, mx.float32),
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": mx.array([3] * 3 + [1] * (len(TOKENS) - 3), mx.int32),
        "tokenizer.ggml.bos_token_id": number(1),
        "tokenizer.ggml.eos_token_id": number(2),
        "tokenizer.ggml.padding_token_id": number(2),
        "tokenizer.chat_template": "{{ messages }}",
    }
    mx.save_gguf(str(file), arrays, metadata)


@pytest.fixture
def opened(module: object, tmp_path: Path) -> OpenedModel:
    """The module, written as GGUF, converted and opened."""
    write_gguf(module, tmp_path / "tiny.gguf")
    directory = tmp_path / "model"
    directory.mkdir()
    convert(tmp_path / "tiny.gguf", directory, packed=False)
    return open_model(str(directory), Path("unused"))


def test_the_directory_computes_what_the_gguf_was_made_of(module: object, opened: OpenedModel) -> None:
    found = load(opened, "float32")
    tokens = mx.array([[3, 5, 9, 1, 7, 4, 4]])
    wanted = module(tokens)  # type: ignore[operator]
    assert mx.abs(found.logits(tokens, found.make_layers()) - wanted).max() < 1e-5
    assert opened.context_length == 64


def test_the_tokenizer_splits_digits_and_knows_special_tokens(opened: OpenedModel) -> None:
    tokenizer = open_tokenizer(opened.checkpoint.file, merge_eos=True)
    spelled = [TOKENS[token] for token in tokenizer.encode("<|im_start|>ab a12<|im_end|>")]
    assert spelled == ["<|im_start|>", "ab", "Ġa", "1", "2", "<|im_end|>"]
    assert tokenizer.eos == frozenset((2,))
