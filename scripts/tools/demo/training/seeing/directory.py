"""The directory of the model that sees: a Qwen 3.5 as Hugging Face publishes it, text model and tower in one file."""

import re
from pathlib import Path
from typing import NamedTuple, cast

import mlx.core as mx
from mlx_lm.models import qwen3_5
from tokenizers import Tokenizer

from runner.media.families.qwen3_5 import Qwen35
from runner.model.towers.qwen3_5 import Qwen35Tower
from scripts.tools.demo.questions import END
from scripts.tools.demo.training.directory import named_weights, read_config, weights_path, write_files
from scripts.tools.demo.training.seeing.tokenizer import SOFT, SPECIAL_TOKENS, START, STOP

_WIDTH = 96
_TOWER = "model.visual."
_PUBLISHED = ((r"^patch_embed\.", "patch_embed.proj."), (r"^((?:blocks\.\d+\.mlp|merger)\.)fc", r"\1linear_fc"))
"""(pattern, replacement) from the names of the tower's parameters to those of a checkpoint."""


class SeeingModel(NamedTuple):
    """Text model and tower, and what config.json says about both."""

    text: qwen3_5.Model
    tower: Qwen35Tower
    family: Qwen35
    sections: list[int]
    """The numbers of frequencies that turn by time, row and column."""


def new_config(tokenizer: Tokenizer) -> dict[str, object]:
    """config.json: every other layer has linear attention, since mlx-lm cannot cache a Qwen 3.5 without such layers."""
    end = tokenizer.token_to_id(END)
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text",
            "hidden_size": _WIDTH,
            "intermediate_size": 2 * _WIDTH,
            "num_hidden_layers": 4,
            "full_attention_interval": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 1,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [3, 3, 2],
                "mrope_interleaved": True,
            },
            "max_position_embeddings": 4096,
            "vocab_size": tokenizer.get_vocab_size(),
            "tie_word_embeddings": True,
            "eos_token_id": end,
        },
        "vision_config": {
            "model_type": "qwen3_5",
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
            "out_hidden_size": _WIDTH,
            "hidden_act": "gelu_pytorch_tanh",
            "deepstack_visual_indexes": [],
        },
        "vision_start_token_id": tokenizer.token_to_id(START),
        "vision_end_token_id": tokenizer.token_to_id(STOP),
        "image_token_id": tokenizer.token_to_id(SOFT),
        "tie_word_embeddings": True,
        "eos_token_id": end,
        "torch_dtype": "float16",
    }


def new_model(config: dict[str, object]) -> SeeingModel:
    """Returns a model of `config`'s shape, whose weights are MLX's random ones."""
    text = cast("dict[str, dict[str, list[int]]]", config["text_config"])
    return SeeingModel(
        qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config)),
        Qwen35Tower.from_config(config),
        Qwen35.from_config(config, {}),
        text["rope_parameters"]["mrope_section"],
    )


def save(directory: Path, model: SeeingModel, tokenizer: Tokenizer, config: dict[str, object]) -> None:
    """Writes the model to `directory`, its weights in float16 and under the names of a published one."""
    weights = {**_text_weights(model.text), **_tower_weights(model.tower)}
    write_files(directory, weights, tokenizer, config, SPECIAL_TOKENS)


def load(directory: Path) -> tuple[SeeingModel, Tokenizer]:
    """Returns the saved model, its weights cast to float32 (fast on every CPU), and its tokenizer."""
    model = new_model(read_config(directory))
    stored = cast("dict[str, mx.array]", mx.load(str(weights_path(directory))))
    wide = {name: weight.astype(mx.float32) for name, weight in stored.items()}
    model.text.load_weights([*model.text.sanitize(wide).items()])
    seen = {name: weight for stored, weight in wide.items() if (name := Qwen35Tower.parameter_name(stored))}
    model.tower.load_weights([*model.tower.sanitize(seen).items()])
    return model, Tokenizer.from_file(str(directory / "tokenizer.json"))


def _text_weights(text: qwen3_5.Model) -> dict[str, mx.array]:
    """Linear attention has its convolution as published, [channels, 1, width], and so norms are less by one."""
    weights = {}
    for name, weight in named_weights(text).items():
        stored = re.sub(r"^language_model\.model\.", "model.language_model.", name)
        if stored.endswith("conv1d.weight"):
            weight = weight.moveaxis(2, 1)
        elif re.search(r"(layernorm|model\.norm|[qk]_norm)\.weight$", name):
            weight = weight - 1
        weights[stored] = weight
    return weights


def _tower_weights(tower: Qwen35Tower) -> dict[str, mx.array]:
    """A patch counts for two moments in time, half in each."""
    weights = {}
    for name, weight in named_weights(tower).items():
        stored = name
        for pattern, replacement in _PUBLISHED:
            stored = re.sub(pattern, replacement, stored)
        if name == "patch_embed.weight":
            sides = (tower.times, tower.patch, tower.patch)
            halves = weight.reshape(-1, 3, 1, *sides[1:]) / tower.times
            weight = mx.broadcast_to(halves, (weight.shape[0], 3, *sides))
        weights[f"{_TOWER}{stored}"] = weight
    return weights
