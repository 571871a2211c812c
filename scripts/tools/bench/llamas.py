"""The models of most benchmarks: Llamas of random weights, on disk and in memory, and prompts for it.

Every token but the 256 bytes and the end of the sequence is a word of its own with a space before it: n such tokens
spell a prompt of n tokens, whatever they are, and each token of an answer is text that can be shown at once. The rows
of all others are zero in the embedding, which is the output too, so greedy answers hold none of them and never end
early.
"""

import json
from collections.abc import Mapping
from itertools import chain, islice, product
from pathlib import Path
from random import Random
from typing import NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

import runner.process.lean_mlx_lm  # noqa: F401  registers mlx_lm without its package __init__
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level, write_tokenizer

# isort: split
from mlx_lm.models import llama

HEAD = GROUP_SIZE = 64
VOCABULARY = 4096
CONTEXT_TOKENS = 16384
END = "<|end|>"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
FIRST_WORD = len(ALL_BYTES)
END_TOKEN = VOCABULARY - 1


class Size(NamedTuple):
    """The size of a model; `hidden` is a multiple of HEAD. The default has 11 M parameters."""

    hidden: int = 384
    layers: int = 6
    dtype: str = "float32"
    bits: int = 0
    """Of each packed weight; 0 if none is packed."""


M1, M10, M60 = Size(128, 4), Size(), Size(768, 9)
"""Of about as many million parameters."""
M10_PACKED = M10._replace(bits=4)
M700, B3 = Size(1536, 28, "bfloat16"), Size(3072, 28, "bfloat16")
"""Such as GPUs are asked to compute: 0.7 and 2.8 billion parameters."""


def words(vocabulary: int) -> list[str]:
    """All of one letter, then all of two, and so on: the beginning of a word is a word, as merges need it."""
    spellings = chain.from_iterable(map("".join, product(_LETTERS, repeat=length)) for length in (1, 2, 3, 4))
    return [f" {spelling}" for spelling in islice(spellings, vocabulary - 1 - FIRST_WORD)]


class Prompts:
    """Prompts that were never seen, from a seed."""

    def __init__(self, seed: int, vocabulary: int = VOCABULARY) -> None:
        self._random = Random(seed)
        self._words = words(vocabulary)

    def ids(self, count: int) -> list[int]:
        return [FIRST_WORD + self._random.randrange(len(self._words)) for _ in range(count)]

    def text(self, count: int) -> str:
        return "".join(self._words[token - FIRST_WORD] for token in self.ids(count))


def make_model(size: Size, seed: int) -> llama.Model:
    """Makes the same weights for the same seed. Raises ValueError for a size that cannot be made."""
    if size.hidden < HEAD or size.hidden % HEAD or size.layers < 1:
        raise ValueError(f"the width of the model is a multiple of {HEAD}, and it has layers")
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(config_of(size)))
    spoken = [FIRST_WORD <= token < END_TOKEN for token in range(VOCABULARY)]
    model.model.embed_tokens.weight *= mx.array(spoken)[:, None]
    model.set_dtype(getattr(mx, size.dtype))
    if size.bits:
        quantize(model, GROUP_SIZE, size.bits)
    model.eval()
    mx.eval(model.parameters())
    return model


def write_model(directory: Path, model: llama.Model, size: Size) -> None:
    """As Hugging Face keeps models: what this runner and `transformers` open."""
    write_files(directory, model, {"architectures": ["LlamaForCausalLM"], **config_of(size)}, VOCABULARY)


def write_files(directory: Path, model: Module, config: Mapping[str, object], vocabulary: int) -> None:
    """Writes any model with the tokenizer of these prompts, of which the last token is the end."""
    (directory / "config.json").write_text(json.dumps({"eos_token_id": vocabulary - 1, **config}))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END})
    )
    spelled = (word.encode() for word in words(vocabulary))
    write_tokenizer(directory, byte_level([*ALL_BYTES, *spelled], [END]))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})


def config_of(size: Size, vocabulary: int = VOCABULARY) -> dict[str, object]:
    """Returns the contents of `config.json`, as mlx-lm's `ModelArgs` take them."""
    heads = size.hidden // HEAD
    packing = {"quantization": {"group_size": GROUP_SIZE, "bits": size.bits, "mode": "affine"}} if size.bits else {}
    return packing | {
        "model_type": "llama",
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "intermediate_size": size.hidden * 8 // 3,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 3 if heads % 3 == 0 else heads,
        "head_dim": HEAD,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": vocabulary,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": True,
        "torch_dtype": size.dtype,
    }
