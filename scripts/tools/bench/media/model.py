"""The model of `scripts/bench media`: a Qwen 3.5 of random weights with a tower, made from a seed.

Every other layer has linear attention. Text is made of the same words as that of the other benchmarks.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

import runner.process.lean_mlx_lm  # noqa: F401  registers mlx_lm without its package __init__
from runner.model.towers.qwen3_5 import Qwen35Tower
from scripts.tools.bench.llamas import CONTEXT_TOKENS, END_TOKEN, HEAD, VOCABULARY, Size, silence, write_words

# isort: split
from mlx_lm.models import qwen3_5

_START, _SOFT, _STOP = (VOCABULARY - each for each in (4, 3, 2))


def config_of(size: Size, tower_blocks: int, tower_width: int) -> dict[str, object]:
    """Returns the contents of `config.json`."""
    heads = size.hidden // HEAD
    text = {
        "model_type": "qwen3_5_text",
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "intermediate_size": size.hidden * 8 // 3,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 3 if heads % 3 == 0 else heads,
        "head_dim": HEAD,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2 * CONTEXT_TOKENS,
        "full_attention_interval": 2,
        "linear_num_value_heads": heads,
        "linear_num_key_heads": heads,
        "linear_key_head_dim": HEAD,
        "linear_value_head_dim": HEAD,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    }
    vision = {
        "depth": tower_blocks,
        "hidden_size": tower_width,
        "intermediate_size": 4 * tower_width,
        "num_heads": tower_width // HEAD,
        "num_position_embeddings": 48**2,
        "out_hidden_size": size.hidden,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "eos_token_id": END_TOKEN,
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": vision,
        "vision_start_token_id": _START,
        "image_token_id": _SOFT,
        "vision_end_token_id": _STOP,
    }


def make_tower(config: Mapping[str, object], seed: int) -> Qwen35Tower:
    """The same weights for the same seed."""
    mx.random.seed(seed)
    tower = Qwen35Tower.from_config(config)
    mx.eval([*_weights(tower).values()])
    return tower


def write_model(directory: Path, config: Mapping[str, object], seed: int) -> None:
    """As mlx-community keeps models."""
    mx.random.seed(seed)
    model = qwen3_5.Model(qwen3_5.ModelArgs.from_dict({**config}))
    silence(model.language_model.model.embed_tokens)
    (directory / "config.json").write_text(json.dumps(config))
    write_words(directory)
    weights = _weights(model)
    tower = _weights(make_tower(config, seed))
    weights |= {f"vision_tower.{name}": array for name, array in tower.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})


def _weights(module: Module) -> dict[str, mx.array]:
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters())))
