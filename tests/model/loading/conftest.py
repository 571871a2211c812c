"""Tiny checkpoints, written once, and helpers that open and run them."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from runner.commands.check.inspection import Inspection, inspect
from runner.model import OpenedModel, open_model
from runner.model.architectures import Config
from runner.model.weights.loading import LoadedModel, load
from runner.settings import CheckSettings
from scripts.tools.models.checkpoints import VOCABULARY_SIZE, Dtype, Kind, make_weights, write_checkpoint
from scripts.tools.models.store import Store, write_store

Checkpoints = Callable[..., Path]

TOKENS = [(7 * index + index * index) % VOCABULARY_SIZE for index in range(44)]
"""Longer than Gemma's window and Llama 4's chunk."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """`checkpoint(kind, dtype="float32")`: a directory, written once for all tests, which must not change it."""
    root = tmp_path_factory.mktemp("checkpoints")

    def get(kind: Kind, dtype: Dtype = "float32") -> Path:
        directory = root / f"{kind}-{dtype}"
        return directory if directory.exists() else write_checkpoint(directory, kind, dtype=dtype)

    return get


@pytest.fixture
def store(tmp_path: Path, checkpoint: Checkpoints) -> Store:
    """The llama checkpoint in a store of its own, which tests may break."""
    return write_store(tmp_path / "models", "tiny", checkpoint("llama"))


def open_stored(store: Store, name: str = "tiny") -> OpenedModel:
    return open_model(name, store.models_dir)


def checked(model: str | Path, models_dir: Path = Path("unused"), **settings: object) -> Inspection:
    """Returns the report of `mlx-runner check`."""
    return inspect(CheckSettings(model=str(model), models_dir=models_dir, log_level=0, **settings))  # type: ignore[arg-type]


def run(model: LoadedModel | object, layers: list[object] | None = None) -> mx.array:
    """Returns scores [1, L + 2, V] of `TOKENS` at once and two more tokens one by one, through the layer caches."""
    from mlx_lm.models.cache import make_prompt_cache

    module = model.module if isinstance(model, LoadedModel) else model
    assert callable(module)
    caches = make_prompt_cache(module)
    steps = [module(mx.array([tokens]), cache=caches) for tokens in (TOKENS, [3], [5])]
    logits: mx.array = mx.concatenate(steps, axis=1)
    mx.eval(logits)
    return logits


def experts_apart(config: Mapping[str, object]) -> dict[str, mx.array]:
    """Returns weights as Qwen publishes them: with a tensor for each expert."""
    weights: dict[str, mx.array] = {}
    for name, array in make_weights(config, 0, "float32").items():
        head, is_stack, tail = name.partition(".switch_mlp.")
        if is_stack:
            weights |= {f"{head}.experts.{index}.{tail}": part for index, part in enumerate(array)}
        else:
            weights[name] = array.moveaxis(1, 2) if "conv1d.weight" in name else array
    return weights


def parameters(module: Module) -> dict[str, mx.array]:
    """Returns the parameters by their names."""
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters())))


def run_path(path: Path | str, models_dir: Path = Path("unused")) -> mx.array:
    return run(load(open_model(str(path), models_dir)))


def same(left: mx.array, right: mx.array) -> bool:
    """Asserts that two arrays are equal bit for bit, and not all NaN."""
    return left.dtype == right.dtype and bool(mx.array_equal(left, right)) and bool(mx.isfinite(left).all())


def bytes_read() -> int:
    """Returns the bytes that this process has read from files so far; 0 where the system does not count them."""
    counts = Path("/proc/self/io")
    lines = counts.read_text().splitlines() if counts.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def layers_apart(config: Config) -> Config:
    """Returns the `config.json` of a Gemma 4, or of an assistant, as transformers has written it since 5.15."""
    changed = copy.deepcopy(config)
    text = cast("Config", changed.get("text_config", changed))
    own = {"head_dim": text.pop("global_head_dim", 512)}
    key_heads = text.pop("num_global_key_value_heads", None)
    if text["attention_k_eq_v"] and key_heads is not None:
        own["num_key_value_heads"] = key_heads
    kinds = cast("list[str]", text["layer_types"])
    full = [f"{layer:02}" for layer, kind in enumerate(kinds) if kind == "full_attention"]
    text["per_layer_config"] = dict.fromkeys(full, own)
    return changed
