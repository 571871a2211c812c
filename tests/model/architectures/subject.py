"""An architecture of mlx-lm's as a tiny model, built and written once for all questions."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from runner.model import OpenedModel, open_model
from scripts.tools.models.architectures import Values, architectures, config, make_module, tiny_of, unserved
from scripts.tools.models.checkpoints import TOKENIZER, write_weights
from scripts.tools.models.store import write_store
from scripts.tools.models.tiny import Tiny
from tests.model.architectures.talk import Talk

SERVED = tuple(name for name in architectures() if name not in unserved())
TOKENS = [(7 * index + index * index) % 64 for index in range(44)]
"""More tokens than the windows and chunks of the tiny models."""

HEAD_IS_CHANGED = "baichuan_m1"
"""Its sanitize divides `lm_head` by its length once more whenever it is loaded."""


class Subject:
    """One architecture. `root` is an empty directory, which becomes a store with the model `m`."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.root = name, root

    @cached_property
    def module(self) -> Module:
        """mlx-lm's module with random weights; nobody may change them."""
        return make_module(self.name)

    @cached_property
    def tiny(self) -> Tiny:
        """The same with its layer caches, for stories."""
        return tiny_of(self.name, self.module)

    @cached_property
    def talk(self) -> Talk:
        return Talk(self.tiny, self.root / "disk")

    @cached_property
    def config(self) -> Values:
        """Its `config.json`, with an architecture that is in no table."""
        own = {"partial_rotary_factor": 1.0} if self.name == "glm" else {}  # the part that mlx-lm turns, whatever it is
        return {**config(self.name), **own, "model_type": self.name, "architectures": [f"{self.name}X"]}

    @cached_property
    def weights(self) -> Mapping[str, mx.array]:
        """Its parameters in float32 with numbers of 16 bits, so that a store of these computes the same."""
        arrays: dict[str, mx.array] = dict(tree_flatten(self.module.parameters()))
        if self.name == HEAD_IS_CHANGED:
            return arrays
        return {name: halved(array).astype(array.dtype) for name, array in arrays.items()}

    @cached_property
    def directory(self) -> Path:
        """The weights under mlx-lm's names."""
        return self.write("directory", self.weights)

    @cached_property
    def opened(self) -> OpenedModel:
        return open_model(str(self.directory), self.root)

    @cached_property
    def expected(self) -> mx.array:
        """What mlx-lm computes from the directory."""
        return run(oracle(self.directory))

    def write(self, folder: str, weights: Mapping[str, mx.array]) -> Path:
        root = self.root / folder
        root.mkdir()
        write_weights(root, dict(weights))
        (root / "config.json").write_text(json.dumps(self.config))
        (root / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        return root

    def store(self, directory: Path) -> None:
        """Makes it the model `m` of the store."""
        write_store(self.root, "m", directory)


def halved(array: mx.array) -> mx.array:
    """Numbers in bfloat16, anything else as it is."""
    return array.astype(mx.bfloat16) if mx.issubdtype(array.dtype, mx.floating) else array


def oracle(directory: Path) -> Module:
    import mlx_lm.utils  # slow: it brings transformers

    module: Module = mlx_lm.utils.load_model(directory)[0]
    return module


def run(module: Module) -> mx.array:
    """Scores [1, 46, 64]: a prefill and two decode steps through the layer caches."""
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(module)
    steps = [module(mx.array([tokens]), cache=caches)[..., :64] for tokens in (TOKENS, [3], [5])]
    logits = mx.concatenate(steps, axis=1)
    mx.eval(logits)
    return logits
