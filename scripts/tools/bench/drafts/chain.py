"""A Llama that says the words of its vocabulary in order, at the price of any other of its size, and its prompts."""

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

import runner.process.lean_mlx_lm  # noqa: F401  registers mlx_lm without its package __init__
from scripts.tools.bench.llamas import END_TOKEN, FIRST_WORD, VOCABULARY, Prompts, Size, config_of, spelled, write_words

# isort: split
from mlx_lm.models import llama

WORDS = END_TOKEN - FIRST_WORD
PROMPT_TOKENS, ANSWER_TOKENS = 256, 128
_MATCH = 6
"""Tokens of a false promise that are the same as those of the answer."""


def write_chain(directory: Path, size: Size, seed: int, step: int = 1) -> None:
    """Attention and feed-forward networks are computed, and add nothing; the output's row of each word is the embedding
    of the one `step` words before it. So with another step every word is another one."""
    config = config_of(size) | {"tie_word_embeddings": False}
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight *= 0
        layer.mlp.down_proj.weight *= 0
    table = model.model.embed_tokens.weight
    words = table[FIRST_WORD:END_TOKEN]
    model.lm_head.weight = mx.zeros((VOCABULARY, size.hidden))
    model.lm_head.weight[FIRST_WORD:END_TOKEN] = mx.concatenate([words[-step:], words[:-step]])
    named = {"architectures": ["LlamaForCausalLM"], "eos_token_id": END_TOKEN}
    (directory / "config.json").write_text(json.dumps(named | config))
    write_words(directory)
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})


class ChainPrompts:
    """Prompts whose answers are words in order. Each begins where the one before it ended, so that no answer of the
    same object is known."""

    def __init__(self, seed: int, start: int = 0) -> None:
        """The first answer begins with the word of this number."""
        self._other = Prompts(seed)
        self._next = start

    def fresh(self, tokens: int, answer: int) -> str:
        """Returns so many tokens; nothing in them has to do with the answer."""
        return self._other.text(tokens - 1) + self._words(self._skip(answer), 1)

    def quoted(self, tokens: int, answer: int) -> str:
        """Returns so many tokens that contain the answer."""
        first = self._skip(answer)
        whole = self._words(first, answer + 1)
        return whole + self._other.text(tokens - answer - 2) + self._words(first, 1)

    def misleading(self, answer: int) -> str:
        """Returns a prompt that goes on otherwise behind every few words of the answer, all of which it contains."""
        first = self._skip(answer)
        parts = [self._words(first + place - _MATCH, _MATCH) + self._other.text(1) for place in range(answer + 1)]
        return "".join(parts) + self._words(first, 1)

    def _skip(self, answer: int) -> int:
        first, self._next = self._next, self._next + answer + 1
        return first

    @staticmethod
    def _words(first: int, count: int) -> str:
        return spelled(FIRST_WORD + (first + place) % WORDS for place in range(count))
