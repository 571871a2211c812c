"""A published model, for the tests: configs, steps between two spellings of its tensors, parts to skip."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from scripts.tools.models.sources_steps import Step

Config = dict[str, object]
Shape = tuple[int, ...]


class Source(NamedTuple):
    """One published model.

    `module` is a config that mlx-lm reads as it should; `config` is the published one. `steps` lead from the module's
    tensors to the published ones. Where mlx-lm cannot open that, or opens it wrongly, `undo` makes something that it
    opens with `module` as its config. `spare` are tensors that no text model needs: vision, audio, token prediction.
    `leftovers` are of the text model, yet of no use to it. Modules whose path ends in one of `dense` hold plain numbers
    whatever the store holds. `tokens` are special tokens of the tokenizer, in the places of bytes: there is no room
    behind the others.
    """

    module: Config
    config: Config
    steps: tuple[Step, ...] = ()
    undo: tuple[Step, ...] | None = None
    spare: Mapping[str, Shape] = {}
    leftovers: Mapping[str, Shape] = {}
    dense: tuple[str, ...] = ()
    tokens: Mapping[str, int] = {}

    @property
    def architecture(self) -> str:
        names = self.config["architectures"]
        assert isinstance(names, list)
        return str(names[0])


def plain(architecture: str, module: Config, **changes: object) -> Source:
    """A source that mlx-lm opens as it stands, named as mlx-lm names it. `changes` are of the published config."""
    return Source(module, {**module, **changes, "architectures": [architecture]})


def tower(prefix: str) -> dict[str, Shape]:
    """A few tensors of a vision or audio tower, one of them a matrix that old releases of Ollama quantized."""
    return {
        f"{prefix}patch_embedding.weight": (8, 4, 4, 3),
        f"{prefix}layers.0.self_attn.q_proj.weight": (64, 64),
        f"{prefix}layers.0.self_attn.q_proj.bias": (64,),
    }


def read_config(directory: Path) -> Config:
    """The `config.json` of a directory."""
    return dict(json.loads((directory / "config.json").read_text()))
