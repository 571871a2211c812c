"""The models of `scripts/bench families`: random weights in 4 bits, from a seed.

`families.toml` has their configurations. Packed weights are random bits, and scales are numbers of 16 bits, so that a
GGUF file holds exactly the same weights. As in `llamas.py`, the rows of all tokens that are no words are zero.
"""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_map_with_path

from scripts.tools.bench.llamas import FIRST_WORD, GROUP_SIZE, write_files
from scripts.tools.models.architectures import module_of, weight

# isort: split
from mlx_lm.models.switch_layers import SwitchLinear

Config = Mapping[str, object]
_TABLES: dict[str, dict[str, object]] = tomllib.loads(Path(__file__).with_name("families.toml").read_text())
SHARED = _TABLES.pop("shared")
"""The fields of all configurations."""
FAMILIES = tuple(_TABLES)
VOCABULARY = cast("int", SHARED["vocab_size"])
BITS = 4
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token")
_DEVIATION = (2 ** (2 * BITS) - 1) ** 0.5 / 12**0.5  # of random numbers of BITS bits


class Parameters(NamedTuple):
    """The number of a model's parameters: all, and those by which the forward of one token multiplies."""

    total: int
    active: int


def config_of(family: str, **others: object) -> Config:
    """Returns the contents of `config.json`, with `others` in place of the table's fields."""
    config = {"model_type": family, **SHARED, **_TABLES[family], **others}
    return {**config, "text_config": config} if family == "qwen3_5" else config


def make(family: str, seed: int, directory: Path, **others: object) -> Parameters:
    """Writes the model: the same for the same seed. Returns its size. `others` are fields of its configuration."""
    mx.random.seed(seed)
    model, size = build(family, **others)
    quantize(model, GROUP_SIZE, BITS, class_predicate=_is_packed)
    model.update(tree_map_with_path(_random, model.parameters()))
    mx.eval(model.parameters())
    packing = {"quantization": {"group_size": GROUP_SIZE, "bits": BITS}}
    write_files(directory, model, {**config_of(family, **others), **packing}, VOCABULARY)
    return size


def build(family: str, **others: object) -> tuple[Module, Parameters]:
    """Returns mlx-lm's module, which is not packed, and its size."""
    config, module = config_of(family, **others), module_of(family)
    model = module.Model(module.ModelArgs.from_dict(config))
    if getattr(model, "tie_word_embeddings", None) is False and config["tie_word_embeddings"]:
        model.sanitize({})  # without a head among the weights the module ties it
    return model, count(model, next((cast("int", config[name]) for name in _CHOSEN if name in config), 0))


def count(model: Module, chosen: int) -> Parameters:
    """Counts the parameters of a model that is not packed, of whose routed experts a token has `chosen`.

    An embedding counts only where it is the head, too.
    """
    modules = dict(model.named_modules())
    total = _size(model)
    idle = 0.0
    for path, module in modules.items():
        if isinstance(module, SwitchLinear):
            idle += _size(module) * (1 - chosen / module.weight.shape[0])
        elif isinstance(module, Embedding) and ("lm_head" in modules or "per_layer" in path):
            idle += _size(module)
    return Parameters(total, total - round(idle))


def _size(module: Module) -> int:
    return sum(array.size for _, array in cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters())))


def _is_packed(_: str, module: Module) -> bool:
    """Leaves out routers, convolutions and other small ones."""
    if not hasattr(module, "to_quantized"):
        return False
    rows, columns = module.weight.shape[-2:]
    return bool(rows >= GROUP_SIZE and columns % GROUP_SIZE == 0)


def _random(path: str, fresh: mx.array) -> mx.array:
    kind = path.rpartition(".")[2]
    if fresh.dtype == mx.uint32:
        halves = (*fresh.shape[:-1], 2 * fresh.shape[-1])  # random numbers have 24 bits
        return mx.random.randint(0, 2**16, halves, mx.uint16).view(mx.uint32)
    if kind in ("scales", "biases"):
        scale = mx.array(2 / (math.sqrt(fresh.shape[-1] * GROUP_SIZE) * _DEVIATION), mx.float16).astype(mx.float32)
        rows = mx.arange(fresh.shape[-2])
        spoken = (rows >= FIRST_WORD) & (rows < VOCABULARY - 1) if fresh.shape[0] == VOCABULARY else rows >= 0
        return mx.broadcast_to(spoken[:, None] * scale * (1 if kind == "scales" else -(2 ** (BITS - 1))), fresh.shape)
    return weight(path, fresh).astype(mx.float32)
