"""The models of `scripts/bench format`: Llamas of random weights with vocabularies of any size, made from a seed.

Tokens are the 256 bytes, words that random merges have made, as byte-level BPE makes them, and the end. Answers are
greedy; bytes that are no ASCII and the end have rows of zeros in the embedding, which is the output too, so an answer
holds only text that can be shown, and never ends early.
"""

import json
from functools import cache
from pathlib import Path
from random import Random

import mlx.core as mx
from mlx.utils import tree_flatten

import runner.process.lean_mlx_lm  # noqa: F401  registers mlx_lm without its package __init__
from runner.tokenizer import Tokenizer, open_tokenizer
from scripts.tools.bench.llamas import M10, Size, config_of
from scripts.tools.models.tokenizers import ALL_BYTES, byte_level, write_tokenizer

# isort: split
from mlx_lm.models import llama

END = "<|end|>"
_LETTERS = [bytes([value]) for value in b"abcdefghijklmnopqrstuvwxyz"]
_MARKS = [bytes([value]) for value in range(0x21, 0x7F)]
_LONGEST = 12


def words(vocabulary: int, seed: int) -> list[bytes]:
    """All tokens but the end. ValueError if there is no room for the bytes."""
    if vocabulary <= len(ALL_BYTES) + 1:
        raise ValueError(f"a vocabulary has more than {len(ALL_BYTES) + 1} tokens")
    random = Random(seed)
    made = {b" ": None} | dict.fromkeys(_LETTERS)
    known = list(made)
    while len(known) < vocabulary - 1 - len(ALL_BYTES) + len(_LETTERS) + 1:
        parts = random.choice(_MARKS if random.random() < 0.1 else known), random.choice(known)
        word = b"".join(parts)
        if len(word) <= _LONGEST and word not in made and b" " not in word[1:]:
            made[word] = None
            known.append(word)
    return [*ALL_BYTES, *(word for word in known if len(word) > 1)]


@cache
def tokenizer_of(vocabulary: int, seed: int) -> Tokenizer:
    """Without a model."""
    files = {
        "tokenizer.json": json.dumps(byte_level(words(vocabulary, seed), [END])).encode(),
        "config.json": json.dumps({"eos_token_id": vocabulary - 1}).encode(),
    }
    return open_tokenizer(files.get)


def make_speaker(vocabulary: int, seed: int, size: Size = M10) -> llama.Model:
    """The same float32 weights for the same seed."""
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(config_of(size, vocabulary)))
    spoken = [token < 0x80 or len(ALL_BYTES) <= token < vocabulary - 1 for token in range(vocabulary)]
    model.model.embed_tokens.weight *= mx.array(spoken)[:, None]
    model.eval()
    mx.eval(model.parameters())
    return model


def write_speaker(directory: Path, vocabulary: int, seed: int, size: Size = M10) -> None:
    """As Hugging Face keeps models."""
    ends = {"architectures": ["LlamaForCausalLM"], "eos_token_id": vocabulary - 1}
    (directory / "config.json").write_text(json.dumps(ends | config_of(size, vocabulary)))
    write_tokenizer(directory, byte_level(words(vocabulary, seed), [END]))
    weights = dict(tree_flatten(make_speaker(vocabulary, seed, size).parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
