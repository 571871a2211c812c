"""A published model, for the tests: configs, steps between two spellings of its tensors, parts to skip.

`sources.toml` has them all as data.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, cast

from scripts.tools.models import data, sources_steps
from scripts.tools.models.checkpoints import TABLES, VOCABULARY_SIZE
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


_PUBLISHED = data.read("sources", VOCABULARY_SIZE=VOCABULARY_SIZE)
_NAMED, _ENCODER = "source ", "encoder "


def _source(table: data.Table) -> Source:
    module = TABLES[cast("str", table["module"])]
    config = {**TABLES[cast("str", table.get("config", table["module"]))], **cast("Config", table.get("changes", {}))}
    if "architecture" in table:
        config["architectures"] = [table["architecture"]]
    steps, undo = cast("list[object]", table.get("steps", [])), cast("list[object] | None", table.get("undo"))
    return Source(
        copy.deepcopy(module),
        copy.deepcopy(config),
        tuple(map(step, steps)),
        None if undo is None else tuple(map(step, undo)),
        _shapes(table.get("spare", {})),
        _shapes(table.get("leftovers", {})),
        tuple(cast("list[str]", table.get("dense", []))),
    )


def step(said: object) -> Step:
    """Returns a step by its name, or by the function that makes it and its arguments."""
    if isinstance(said, str) and said in _PUBLISHED["steps"]:
        said = _PUBLISHED["steps"][said]
    if isinstance(said, str):
        return cast("Step", getattr(sources_steps, said))
    function, *arguments = cast("list[object]", said)
    return cast("Step", getattr(sources_steps, cast("str", function))(*arguments))


def _shapes(said: object, prefix: str = "") -> dict[str, Shape]:
    """Returns tensors: those of another table, or of all names that a pattern stands for."""
    shapes: dict[str, Shape] = {}
    for pattern, shape in cast("dict[str, str | list[int]]", said).items():
        for name in _alternatives(prefix + pattern):
            shapes |= _shapes(_PUBLISHED[shape], name) if isinstance(shape, str) else {name: tuple(shape)}
    return shapes


def tensors(table: str, prefix: str) -> dict[str, Shape]:
    """Returns the tensors of a table of sources.toml, their names with a prefix."""
    return _shapes(_PUBLISHED[table], prefix)


def _alternatives(pattern: str) -> Iterator[str]:
    """Yields the names that a pattern with {alternatives} or {first..last} stands for."""
    head, found, rest = pattern.partition("{")
    if not found:
        yield pattern
        return
    choices, _, tail = rest.partition("}")
    first, is_range, last = choices.partition("..")
    for choice in range(int(first), int(last) + 1) if is_range else choices.split(","):
        yield from _alternatives(f"{head}{choice}{tail}")


SOURCES: dict[str, Source] = {
    name.removeprefix(_NAMED): _source(table) for name, table in _PUBLISHED.items() if name.startswith(_NAMED)
}
"""Every source by a short name of ours."""
ENCODERS: dict[str, Source] = {
    name.removeprefix(_ENCODER): _source(table) for name, table in _PUBLISHED.items() if name.startswith(_ENCODER)
}
"""The models that make embeddings, which mlx-lm lacks, likewise."""


def read_config(directory: Path) -> Config:
    return dict(json.loads((directory / "config.json").read_text()))
