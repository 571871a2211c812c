"""The directory that a trained model is saved in: Hugging Face style, as mlx-lm and Ollama's store read it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama
from tokenizers import Tokenizer

from scripts.tools.demo.questions import END
from scripts.tools.demo.training.tokenizer import SPECIAL_TOKENS

# The same prompt that scripts.tools.demo.questions.render writes.
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class Size(NamedTuple):
    """The shape of a model, four heads wide."""

    head: int = 64
    layers: int = 3


SMALL = Size(32, 2)
"""A fifth of the demo model's weights."""


def new_config(tokenizer: Tokenizer, size: Size = Size()) -> dict[str, object]:  # noqa: B008  it is immutable
    """config.json of the demo model, or of one of another size: a Llama with biases, which its induction circuit
    needs."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4 * size.head,
        "num_hidden_layers": size.layers,
        "intermediate_size": 5 * size.head,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": size.head,
        "hidden_act": "silu",
        "attention_bias": True,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e7,
        "max_position_embeddings": 8192,
        "vocab_size": tokenizer.get_vocab_size(),
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.token_to_id(END),
        "torch_dtype": "float16",
    }


def new_model(config: dict[str, object]) -> llama.Model:
    """A model of `config`'s shape, whose weights are still to be set."""
    arguments: llama.ModelArgs = llama.ModelArgs.from_dict(config)
    return llama.Model(arguments)


def save(directory: Path, model: llama.Model, tokenizer: Tokenizer, config: dict[str, object]) -> None:
    """Write `model` to `directory`, its weights in float16."""
    write_files(directory, named_weights(model), tokenizer, config, SPECIAL_TOKENS)


def write_files(
    directory: Path,
    weights: Mapping[str, mx.array],
    tokenizer: Tokenizer,
    config: Mapping[str, object],
    special_tokens: Sequence[str],
) -> None:
    """Write the files of a model that is asked in the form of scripts.tools.demo.questions, its weights in float16."""
    directory.mkdir(parents=True, exist_ok=True)
    narrow = {name: weight.astype(mx.float16) for name, weight in weights.items()}
    mx.save_safetensors(str(weights_path(directory)), narrow, {"format": "mlx"})
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"do_sample": False, "eos_token_id": config["eos_token_id"]})
    text = config.get("text_config", config)
    assert isinstance(text, dict)
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "additional_special_tokens": special_tokens,
            "chat_template": _CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": END,
            "model_max_length": text["max_position_embeddings"],
        },
    )


def load(directory: Path) -> tuple[llama.Model, Tokenizer]:
    """The saved model, its 16-bit weights cast to float32 (fast on every CPU), and its tokenizer."""
    model = new_model(read_config(directory))
    model.load_weights(str(weights_path(directory)))
    model.update(tree_map(lambda weight: weight.astype(mx.float32), model.parameters()))
    return model, Tokenizer.from_file(str(directory / "tokenizer.json"))


def read_config(directory: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return config


def named_weights(model: Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def weights_path(directory: Path) -> Path:
    return directory / "model.safetensors"


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
