"""Tiny models of architectures that can be split and of others, and two processes that share models."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from scripts.tools.models.architectures import config, make_module
from scripts.tools.models.checkpoints import TOKENIZER, write_weights
from tests.model.ranks.pair import Pair, pair

Written = Callable[[str], Path]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """`written(name)`: a directory with the tiny model of an architecture, made once; no test may change it."""
    root = tmp_path_factory.mktemp("architectures")

    def get(name: str) -> Path:
        directory = root / name
        if not directory.exists():
            directory.mkdir()
            write_weights(directory, dict(tree_flatten(make_module(name).parameters())))
            known = {**config(name), "model_type": name, "architectures": [f"{name}X"]}
            (directory / "config.json").write_text(json.dumps(known))
            (directory / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        return directory

    return get


@pytest.fixture(autouse=True)
def alone_in_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that loads with `splitting.one_of` has nobody to ask."""
    monkeypatch.setattr(mx.distributed, "all_min", lambda number, **_: number)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A group of two processes, for all tests of a file."""
    with pair(tmp_path_factory.mktemp("pair")) as members:
        yield members
